"""Estimators take what Python programs hold, and say to the bit what the commands say."""

import csv
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.model_selection import GridSearchCV, cross_val_score

import bertsmith
from api.conftest import reviews
from bertsmith.api.texts import MultilabelClassifier, TextClassifier, TextRegressor
from bertsmith.errors import UserError
from bertsmith.recipes.config import FinetuneConfig, PredictConfig
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.predict import predict
from bertsmith.train.config import OptimConfig


def fast(kind: type[Any], folder: Path, **more: Any) -> Any:
    values = {"epochs": 12, "learning_rate": 5e-3, "examples_per_step": 16, "precision": "fp32"}
    return kind(str(folder), **(values | more))


def test_classes_are_learned_from_lists_and_come_back_as_they_were(
    encoder_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts, words = reviews(120)
    labels = [7 if word == "pos" else 3 for word in words]
    fitted = fast(TextClassifier, encoder_folder).fit(texts, labels)
    assert fitted.classes_.tolist() == [3, 7]
    fresh, truth = reviews(40, seed=1)
    said = fitted.predict(fresh)
    assert said.dtype == fitted.classes_.dtype
    right = [7 if word == "pos" else 3 for word in truth]
    assert fitted.score(fresh, right) == np.mean(said == right) > 0.9
    plain = TextClassifier.load(fitted.model_folder_).set_params(precision="fp32")
    assert plain.classes_.tolist() == ["3", "7"]  # names, as the command writes them
    assert plain.score(fresh, right) == fitted.score(fresh, right)
    chances = fitted.predict_proba(fresh)
    assert chances.shape == (40, 2)
    np.testing.assert_allclose(chances.sum(1), 1.0, atol=1e-6)
    assert (fitted.classes_[chances.argmax(1)] == said).all()
    assert capfd.readouterr().err == ""


def test_the_numbers_are_those_of_the_commands_to_the_bit(
    encoder_folder: Path, tmp_path: Path
) -> None:
    texts, labels = reviews(100)
    table = tmp_path / "train.jsonl"
    table.write_text(
        "".join(
            json.dumps({"text": t, "label": v}) + "\n" for t, v in zip(texts, labels, strict=True)
        )
    )
    optim = OptimConfig(learning_rate=5e-3, warmup_share=0.1, beta2=0.999, eps=1e-8)
    finetune(
        FinetuneConfig(
            model=str(encoder_folder), data=str(table), output=str(tmp_path / "run"), epochs=2,
            examples_per_step=16, precision="fp32", optim=optim, seed=3,
        )
    )  # fmt: skip
    fitted = fast(TextClassifier, encoder_folder, epochs=2, seed=3).fit(texts, labels)
    weights = "model/model.safetensors"
    mine = Path(fitted.model_folder_) / "model.safetensors"
    assert mine.read_bytes() == (tmp_path / "run" / weights).read_bytes()

    fresh = tmp_path / "fresh.txt"
    fresh.write_text("\n".join(reviews(5000, seed=9)[0]) + "\n")
    predict(
        PredictConfig(
            model=str(tmp_path / "run"), data=str(fresh), output=str(tmp_path / "said.csv"),
            precision="fp32",
        )
    )  # fmt: skip
    with (tmp_path / "said.csv").open() as file:
        rows = list(csv.DictReader(file))
    loaded = TextClassifier.load(tmp_path / "run").set_params(precision="fp32")
    given = [row["text"] for row in rows]
    assert loaded.predict(given).tolist() == [row["prediction"] for row in rows]
    for column, name in enumerate(loaded.classes_):
        found = [f"{p:.6g}" for p in loaded.predict_proba(given)[:, column]]
        assert found == [row[f"probability_{name}"] for row in rows]


def test_tables_of_pandas_and_arrow_are_taken(encoder_folder: Path) -> None:
    texts, labels = reviews(60)
    frame = pd.DataFrame({"id": range(60), "review": texts, "sentiment": labels})
    fitted = fast(TextClassifier, encoder_folder, epochs=1).fit(frame)
    said = fitted.predict(frame[["review"]])
    assert (fitted.predict(frame["review"]) == said).all()
    assert (fitted.predict(pa.Table.from_pandas(frame)) == said).all()
    assert (fitted.predict(pa.array(texts)) == said).all()
    assert (fitted.predict(np.array(texts, dtype=object)) == said).all()
    assert fitted.score(frame) == fitted.score(texts, labels)
    again = fast(TextClassifier, encoder_folder, epochs=1).fit(frame[["review"]], frame.sentiment)
    assert (again.predict_proba(texts) == fitted.predict_proba(texts)).all()


def test_pairs_are_tuples(encoder_folder: Path) -> None:
    texts, labels = reviews(60)
    pairs = [("the ox", text) for text in texts]
    fitted = fast(TextClassifier, encoder_folder, epochs=1).fit(pairs, labels)
    frame = pd.DataFrame({"text": ["the ox"] * 60, "text_b": texts})
    assert (fitted.predict_proba(frame) == fitted.predict_proba(pairs)).all()
    with pytest.raises(UserError, match="reads pairs"):
        fitted.predict(texts)


@pytest.mark.parametrize("kind", [TextClassifier, MultilabelClassifier, TextRegressor])
def test_a_saved_or_pickled_model_says_the_same(
    kind: type[Any], encoder_folder: Path, tmp_path: Path
) -> None:
    texts, words = reviews(60)
    labels: dict[type[Any], list[Any]] = {
        TextClassifier: [word == "pos" for word in words],
        MultilabelClassifier: [[word] if i % 3 else [word, "more"] for i, word in enumerate(words)],
        TextRegressor: [0.25 if word == "pos" else 4.5 for word in words],
    }
    fitted = fast(kind, encoder_folder, epochs=2).fit(texts, labels[kind])
    said = fitted.predict(texts)
    fitted.save(tmp_path / "kept")
    with pytest.raises(UserError, match="exists already"):
        fitted.save(tmp_path / "kept")
    stored = pickle.dumps(fitted)
    folder = Path(fitted.model_folder_)
    del fitted
    assert not folder.exists()  # what was temporary went with its owner
    for other in (kind.load(tmp_path / "kept"), pickle.loads(stored)):
        again = other.predict(texts)
        assert list(again) == list(said)
        assert other.get_params()["epochs"] == 2


def test_labels_in_an_array_of_0_and_1_come_back_as_one(encoder_folder: Path) -> None:
    texts, words = reviews(120)
    has = np.array([[word == "pos", False, word == "neg"] for word in words], dtype=int)
    fitted = fast(MultilabelClassifier, encoder_folder).fit(texts, has)
    said = fitted.predict(texts)
    assert (said == has).all()
    assert fitted.score(texts, has) == 1.0
    chances = fitted.predict_proba(texts)
    assert chances.shape == (120, 3)
    assert (chances[:, 1] == 0.0).all()
    assert ((chances > 0.5) == said).all()


def test_numbers_are_learned(encoder_folder: Path) -> None:
    texts, words = reviews(120)
    numbers = [1.0 if word == "pos" else -1.0 for word in words]
    fitted = fast(TextRegressor, encoder_folder).fit(texts, numbers)
    assert fitted.predict(texts).dtype == np.float64
    residual = np.square(fitted.predict(texts) - numbers).sum()
    # The numbers' mean is 0 and their squares are 1, so the total is their count.
    assert fitted.score(texts, numbers) == pytest.approx(1.0 - residual / 120)
    assert fitted.score(texts, numbers) > 0.5


def test_scikit_learn_takes_them_for_its_own(encoder_folder: Path) -> None:
    made = fast(TextClassifier, encoder_folder, options={"patience": None, "eval_every_steps": 42})
    copied = clone(made)
    assert copied is not made
    assert copied.get_params() == made.get_params()
    assert is_classifier(made)
    assert is_regressor(fast(TextRegressor, encoder_folder))
    with pytest.raises(ValueError, match="no parameter 'epoch'"):
        made.set_params(epoch=2)
    texts, labels = reviews(150)
    scores = cross_val_score(made, texts, labels, cv=3)
    assert scores.shape == (3,)
    assert scores.mean() > 0.8
    made.set_params(epochs=2)
    likelihood = cross_val_score(
        made, np.array(texts, dtype=object), labels, cv=2, scoring="neg_log_loss"
    )
    assert np.isfinite(likelihood).all()
    frame = pd.DataFrame({"text": texts})
    search = GridSearchCV(made, {"learning_rate": [1e-7, 5e-3]}, cv=2).fit(frame, labels)
    assert search.best_params_["learning_rate"] in (1e-7, 5e-3)
    assert search.predict(frame).tolist() == search.best_estimator_.predict(texts).tolist()


def test_importing_the_package_waits_for_no_torch() -> None:
    code = (
        "import sys, bertsmith; assert bertsmith.__version__;"
        "heavy = {'torch', 'numpy', 'sklearn', 'pandas'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "bertsmith.TextClassifier; assert 'torch' in sys.modules;"
        "light = {'sklearn', 'pandas'} & set(sys.modules); assert not light, light"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = bertsmith.Nothing


@pytest.mark.parametrize(
    ("texts", "labels", "said"),
    [
        ("good film", ["pos"], "texts: is one text"),
        (["good", "bad"], ["pos"], "2 texts and 1 labels"),
        (["good", float("nan")], ["pos", "neg"], "texts, row 1: is nan"),
        (["good", " "], ["pos", "neg"], "texts, row 1: is empty"),
        (["good", "bad"], ["pos", None], "labels, row 1: the label is missing"),
        (["good", "bad"], [1, "1"], "labels, row 1: '1' and 1 are one label"),
        (["good", "bad"], None, "labels are missing"),
        ([("good", "ox"), "bad"], ["pos", "neg"], "row 1: is no pair"),
        (pd.DataFrame({"words": ["good"], "label": ["pos"]}), None, "no text column found"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(
    texts: Any, labels: Any, said: str, encoder_folder: Path
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        fast(TextClassifier, encoder_folder).fit(texts, labels)
    assert "\n" not in str(caught.value)


def test_parameters_are_refused_at_fit(encoder_folder: Path, tmp_path: Path) -> None:
    texts, labels = reviews(40)
    with pytest.raises(UserError, match="is not fitted yet"):
        fast(TextClassifier, encoder_folder).predict(texts)
    with pytest.raises(UserError, match="did you mean optim"):
        fast(TextClassifier, encoder_folder, options={"optimm": 1}).fit(texts, labels)
    with pytest.raises(UserError, match="epochs is -1"):
        fast(TextClassifier, encoder_folder, epochs=-1).fit(texts, labels)
    with pytest.raises(UserError, match="missing"):
        fast(TextClassifier, tmp_path / "missing").fit(texts, labels)
