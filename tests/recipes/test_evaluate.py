"""Evaluation counts the whole table, and prints it for people and for programs."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sklearn import metrics as sklearn_metrics

from bertsmith.errors import UserError
from bertsmith.recipes.config import EvaluateConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate, main
from bertsmith.recipes.predict import predict

LABELS = ("neg", "pos", "so so")
MakeClassifier = Callable[..., Path]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, count: int = 60) -> Path:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(count):
            words = draw.choices(["good", "bad", "film", "ox"], k=draw.randint(1, 6))
            writer.writerow([" ".join(words), draw.choice(LABELS)])
    return path


def settings(model: Path, data: Path, *, json: bool = False, pack: int = 64) -> EvaluateConfig:
    return EvaluateConfig(
        model=str(model), data=str(data), json=json, precision="fp32", tokens_per_pack=pack
    )


def test_scores_are_those_of_the_predictions(
    tmp_path: Path, make_classifier: MakeClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = make_classifier(labels=LABELS), write_table(tmp_path / "test.csv")
    assert main(settings(folder, data, json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    output = str(tmp_path / "p.csv")
    predict(PredictConfig(model=str(folder), data=str(data), output=output, precision="fp32"))
    rows = read_csv(tmp_path / "p.csv")
    true, predicted = [r["label"] for r in rows], [r["prediction"] for r in rows]
    assert found["num_examples"] == 60
    assert found["metrics"]["accuracy"] == sklearn_metrics.accuracy_score(true, predicted)
    confusion = sklearn_metrics.confusion_matrix(true, predicted, labels=LABELS)
    assert found["confusion"] == confusion.tolist()
    assert [s["label"] for s in found["labels"]] == list(LABELS)


def test_scores_do_not_depend_on_the_packs(tmp_path: Path, make_classifier: MakeClassifier) -> None:
    folder, data = make_classifier(labels=LABELS), write_table(tmp_path / "test.csv")
    one, many = (evaluate(settings(folder, data, pack=p)).metrics for p in (8, 10_000))
    assert one.details()["confusion"] == many.details()["confusion"]
    # Equal texts tie within a pack and may differ in the last bit between packs.
    ranked = {name: one.by_name()[name] for name in ("roc_auc", "average_precision")}
    assert one.by_name() == pytest.approx(many.by_name() | ranked, abs=1e-6)
    assert many.by_name() == pytest.approx(one.by_name(), abs=5e-3)


def test_tables_name_every_score_and_label(
    tmp_path: Path, make_classifier: MakeClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_classifier(labels=("neg", "pos", "[so] so"))
    data = write_table(tmp_path / "test.csv")
    data.write_text(data.read_text().replace("so so", "[so] so"))
    assert main(settings(folder, data)) == 0
    printed = capsys.readouterr().out
    for name in ("accuracy", "matthews_correlation", "macro_f1", "support", "[so] so", "60"):
        assert name in printed


def test_no_name_is_cut_on_a_narrow_terminal(
    tmp_path: Path,
    make_classifier: MakeClassifier,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "balance_not_updated_after_bank_transfer"
    data = write_table(tmp_path / "test.csv")
    data.write_text(data.read_text().replace("so so", long))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(settings(make_classifier(labels=("neg", "pos", long)), data)) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    for name in ("matthews_correlation", "precision", "recall", "support", f"\n{long} "):
        assert name in printed


def test_many_labels_list_the_worst_confusions(
    tmp_path: Path, make_classifier: MakeClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_classifier(labels=(*LABELS, *(f"more {i}" for i in range(20))))
    assert main(settings(folder, write_table(tmp_path / "test.csv"))) == 0
    assert "most frequent confusions" in capsys.readouterr().out


def test_a_label_the_model_does_not_know_is_named_with_its_row(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    folder = make_classifier(labels=("neg", "pos"))
    (tmp_path / "test.csv").write_text("text,label\ngood,pos\nbad,awful\n")
    with pytest.raises(UserError, match=r"test.csv:3 \(row 2\): the label 'awful' does not occur"):
        evaluate(settings(folder, tmp_path / "test.csv"))


@pytest.mark.parametrize("asked", [2, 33])
def test_a_length_the_model_cannot_read_is_refused(
    tmp_path: Path, make_classifier: MakeClassifier, asked: int
) -> None:
    config = EvaluateConfig(
        model=str(make_classifier(labels=LABELS)),
        data=str(write_table(tmp_path / "test.csv")),
        max_sequence_tokens=asked,
    )
    with pytest.raises(UserError, match="must be from 3 to 32"):
        evaluate(config)


def test_an_encoder_without_a_head_is_refused(tmp_path: Path, tiny_encoder_folder: Path) -> None:
    with pytest.raises(UserError, match="no classifier"):
        evaluate(settings(tiny_encoder_folder, write_table(tmp_path / "test.csv")))


def test_a_model_without_its_tokenizer_is_refused(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    folder = make_classifier(labels=LABELS)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        evaluate(settings(folder, write_table(tmp_path / "test.csv")))
