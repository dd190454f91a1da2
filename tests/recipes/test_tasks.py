"""Each kind of task from a small table to predictions, and what is refused on the way."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from bertsmith.checkpoint.folder import newest_checkpoint, read_state
from bertsmith.errors import UserError
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.evaluate import main as evaluate_main
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.predict import predict
from bertsmith.tasks.config import DecideConfig, LossConfig
from bertsmith.train.config import OptimConfig

WORDS = ("good", "bad", "film")


def write_table(path: Path, count: int, *, form: str, pair: bool = False, seed: int = 0) -> Path:
    """Texts of the words above; the label says which occur, or how often "good" does."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = list(WORDS) if form == "columns" else ["label"]
        writer.writerow([*(["text", "text_b"] if pair else ["text"]), *columns])
        for _ in range(count):
            found = [w for w in WORDS if draw.random() < 0.4]
            words = [*found, *draw.choices(["ox", "the"], k=draw.randint(1, 3))]
            draw.shuffle(words)
            label: list[object] = [f"{1.5 * ('good' in found) - 0.75 * ('bad' in found):.2f}"]
            if form == "columns":
                label = [int(w in found) for w in WORDS]
            elif form == "joined":
                label = ["|".join(found)]
            elif form == "json":
                label = [json.dumps(found)]
            writer.writerow([*(["the ox"] if pair else []), " ".join(words), *label])
    return path


def settings(model: Path, data: Path, output: Path, **more: Any) -> FinetuneConfig:
    optim = OptimConfig(learning_rate=more.pop("learning_rate", 5e-3), beta2=0.999)
    values: dict[str, Any] = {"epochs": 12, "examples_per_step": 16, "precision": "fp32"} | more
    return FinetuneConfig(
        model=str(model), data=str(data), output=str(output), optim=optim, **values
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scores_there(folder: Path, rows: list[dict[str, str]], *, pair: bool) -> torch.Tensor:
    """What transformers computes with the folder."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [[r["text"] for r in rows], *([[r["text_b"] for r in rows]] if pair else [])]
    with torch.no_grad():
        encoded = tokenizer(*texts, return_tensors="pt", padding=True, truncation=True)
        scores: torch.Tensor = model(**encoded).logits
    return scores


@pytest.mark.parametrize("pair", [False, True])
def test_numbers_are_learned_and_predicted_as_in_transformers(
    tmp_path: Path, tiny_encoder_folder: Path, pair: bool
) -> None:
    data = write_table(tmp_path / "train.csv", 240, form="number", pair=pair)
    dev = write_table(tmp_path / "dev.csv", 60, form="number", pair=pair, seed=1)
    summary = finetune(settings(tiny_encoder_folder, data, tmp_path / "run", eval=str(dev)))
    assert summary.metrics["spearman"] > 0.8
    assert summary.metrics["loss"] == summary.metrics["mse"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "task: regression, because the label" in log
    assert "best by spearman" in log
    folder = tmp_path / "run" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "label"})

    found = evaluate(EvaluateConfig(model=str(folder), data=str(dev), precision="fp32"))
    assert found.metrics.by_name() == pytest.approx(summary.metrics, abs=1e-4)
    predict(
        PredictConfig(
            model=str(folder), data=str(dev), output=str(tmp_path / "p.csv"), precision="fp32"
        )
    )
    rows = read_csv(tmp_path / "p.csv")
    assert list(rows[0])[-2:] == ["label", "prediction"]
    predictions = [float(r["prediction"]) for r in rows]
    theirs = scores_there(folder, rows, pair=pair)
    assert predictions == pytest.approx(theirs[:, 0].tolist(), abs=2e-5)
    true = torch.tensor([float(r["label"]) for r in rows])
    mse = float((torch.tensor(predictions) - true).square().mean())
    assert mse == pytest.approx(summary.metrics["mse"], rel=1e-3)


@pytest.mark.parametrize("form", ["joined", "columns", "json"])
def test_several_labels_are_learned_and_predicted_as_in_transformers(
    tmp_path: Path, tiny_encoder_folder: Path, form: str
) -> None:
    data = write_table(tmp_path / "train.csv", 240, form=form)
    dev = write_table(tmp_path / "dev.csv", 60, form=form, seed=1)
    config = settings(
        tiny_encoder_folder,
        data,
        tmp_path / "run",
        eval=str(dev),
        epochs=30,
        patience=None,
    )
    if form == "columns":
        columns = list(WORDS)
        config = settings(
            tiny_encoder_folder,
            data,
            tmp_path / "run",
            eval=str(dev),
            epochs=30,
            patience=None,
            table=type(config.table)(label_columns=columns),
        )
    summary = finetune(config)
    assert summary.metrics["average_precision"] > 0.8
    assert "task: multilabel, because" in (tmp_path / "run" / "log.txt").read_text()
    folder = tmp_path / "run" / "model"
    names = WORDS if form == "columns" else tuple(sorted(WORDS))
    found = evaluate(EvaluateConfig(model=str(folder), data=str(dev), precision="fp32"))
    assert found.metrics.by_name() == pytest.approx(summary.metrics, abs=1e-4)

    for name in ("p.csv", "p.jsonl"):
        output = str(tmp_path / name)
        predict(PredictConfig(model=str(folder), data=str(dev), output=output, precision="fp32"))
    rows = read_csv(tmp_path / "p.csv")
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    chances = scores_there(folder, rows, pair=False).sigmoid()
    for row, line, expected in zip(rows, lines, chances.tolist(), strict=True):
        shares = [float(row[f"probability_{name}"]) for name in names]
        assert shares == pytest.approx(expected, abs=2e-6)
        assert [line["probabilities"][name] for name in names] == shares
        over = [name for name, share in zip(names, shares, strict=True) if share > 0.5]
        assert row["prediction"] == "|".join(over)
        assert line["prediction"] == over
    oracle = pipeline("text-classification", model=str(folder), top_k=None)
    theirs = {e["label"]: e["score"] for e in oracle([rows[0]["text"]])[0]}
    assert theirs == pytest.approx(dict(zip(names, chances[0].tolist(), strict=True)), abs=1e-5)


def test_decisions_are_kept_with_the_model_and_used(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    data = write_table(tmp_path / "train.csv", 120, form="joined")
    half, tuned = (
        finetune(
            settings(
                tiny_encoder_folder,
                data,
                tmp_path / thresholds,
                epochs=1,
                learning_rate=1e-3,
                decide=DecideConfig(thresholds=thresholds, calibrate=thresholds == "tuned"),
            )
        )
        for thresholds in ("half", "tuned")
    )
    assert tuned.metrics["macro_f1"] > half.metrics["macro_f1"]
    assert tuned.metrics["loss"] <= half.metrics["loss"]
    folder = tmp_path / "tuned" / "model"
    stored = json.loads((folder / "bertsmith.json").read_text())["decisions"]
    assert set(stored["thresholds"]) == set(WORDS)
    assert stored["temperature"] != 1.0
    output = str(tmp_path / "p.jsonl")
    predict(PredictConfig(model=str(folder), data=str(data), output=output, precision="fp32"))
    lines = [json.loads(line) for line in Path(output).read_text().splitlines()]
    for line in lines:
        over = [n for n, p in line["probabilities"].items() if p > stored["thresholds"][n]]
        assert line["prediction"] == over
    rows = [{"text": line["text"]} for line in lines]
    chances = (scores_there(folder, rows, pair=False) / stored["temperature"]).sigmoid()
    assert [p["probabilities"][n] for p in lines for n in sorted(WORDS)] == pytest.approx(
        chances.flatten().tolist(), abs=1e-5
    )
    found = evaluate(EvaluateConfig(model=str(folder), data=str(data), precision="fp32"))
    true = [set(filter(None, line["label"].split("|"))) for line in lines]
    right = sum(set(line["prediction"]) == t for line, t in zip(lines, true, strict=True))
    assert found.metrics.by_name()["exact_match"] == pytest.approx(right / len(lines))


@pytest.mark.parametrize("loss", [{"class_weights": "balanced"}, {"focal_gamma": 2.0}])
def test_weighted_classes_go_all_the_way_and_a_resumed_run_holds_them(
    tmp_path: Path, tiny_encoder_folder: Path, loss: dict[str, Any]
) -> None:
    lines = ["text,label", *["good film,pos", "bad ox,neg", "the bad,neg", "bad film,neg"] * 8]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    run = tmp_path / "run"
    config = settings(
        tiny_encoder_folder,
        tmp_path / "t.csv",
        run,
        epochs=24,
        patience=None,
        loss=LossConfig(**loss),
    )
    assert finetune(config).metrics["accuracy"] == 1.0
    with pytest.raises(UserError, match=f"{next(iter(loss))} was"):
        finetune(
            settings(
                tiny_encoder_folder, tmp_path / "t.csv", run, epochs=24, patience=None, resume=True
            )
        )


def test_mistakes_are_written_worst_first_and_safe_for_spreadsheets(
    tmp_path: Path, tiny_encoder_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["text,label", *["good,pos", "bad,neg"] * 16]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    finetune(settings(tiny_encoder_folder, tmp_path / "t.csv", tmp_path / "run", epochs=20))
    (tmp_path / "test.csv").write_text("text,label\ngood,pos\n=good good,neg\nthe bad,pos\n")
    errors = tmp_path / "errors.csv"
    config: dict[str, Any] = {
        "model": str(tmp_path / "run" / "model"),
        "data": str(tmp_path / "test.csv"),
        "precision": "fp32",
        "errors": str(errors),
    }
    evaluate_main(EvaluateConfig(**config, bootstrap=50, json=True))
    found = json.loads(capsys.readouterr().out)
    low, high = found["intervals"]["accuracy"]
    assert found["metrics"]["accuracy"] == pytest.approx(1 / 3)
    assert 0.0 <= low < 1 / 3 < high <= 1.0
    rows = read_csv(errors)
    assert {(r["row"], r["line"], r["text"], r["label"], r["prediction"]) for r in rows} == {
        ("2", "3", "'=good good", "neg", "pos"),
        ("3", "4", "the bad", "pos", "neg"),
    }
    losses = [float(r["loss"]) for r in rows]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(UserError, match=r"--errors .*errors.csv: exists already"):
        evaluate(EvaluateConfig(**config))
    evaluate(EvaluateConfig(**config, overwrite=True, escape_formulas=False, errors_rows=1))
    assert len(read_csv(errors)) == 1
    with pytest.raises(UserError, match=r"--errors errors.jsonl: the ending must be .csv"):
        evaluate(EvaluateConfig(**(config | {"errors": "errors.jsonl"})))
    assert evaluate_main(EvaluateConfig(**config, overwrite=True, bootstrap=20)) == 0
    assert "from (95 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("train", "dev", "more", "says"),
    [
        ("a,0.5\nb,1\n", "a,x\n", {}, "dev.csv:2 (row 1): 'x' is no number (column 'label')"),
        ("a,0.5\nb,\n", None, {}, "train.csv:3 (row 2): the score is missing"),
        ("a,0.5\nb,0.5\n", None, {}, "every row has the score 0.5"),
        ("a,x\nb,y\n", None, {"task": "regression"}, "train.csv:2 (row 1): 'x' is no number"),
        ("a,x|y\nb,x\nc,y\n", "a,z\n", {}, "dev.csv:2 (row 1): the label 'z' does not occur"),
        ("a,x\nb,y\n", None, {"monitor": "spearman"}, "classification has no such metric"),
        ("a,0.5\nb,1\n", None, {"monitor": "accuracy"}, "--monitor accuracy: regression has no"),
        (
            "a,x\nb,y\n",
            "a,x\nb,x\n",
            {"monitor": "roc_auc"},
            "--monitor roc_auc: is not defined on the examples to judge by",
        ),
        (
            "a,x\nb,y\nc,x\n",
            None,
            {"loss": LossConfig(class_weights="{z: 2}")},
            "--loss.class_weights: there is no label 'z'",
        ),
        (
            "a,x\nb,y\n",
            None,
            {"decide": DecideConfig(thresholds="tuned")},
            "--decide.thresholds tuned: is for several labels a text",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_before_training(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    train: str,
    dev: str | None,
    more: dict[str, Any],
    says: str,
) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + train)
    if dev is not None:
        (tmp_path / "dev.csv").write_text("text,label\n" + dev)
        more = more | {"eval": str(tmp_path / "dev.csv")}
    with pytest.raises(UserError) as caught:
        finetune(settings(tiny_encoder_folder, tmp_path / "train.csv", tmp_path / "run", **more))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_for_another_kind_is_replaced(tmp_path: Path, tiny_encoder_folder: Path) -> None:
    data = write_table(tmp_path / "train.csv", 40, form="joined")
    finetune(settings(tiny_encoder_folder, data, tmp_path / "several", epochs=1))
    model = tmp_path / "several" / "model"
    again = tmp_path / "again"
    finetune(settings(model, data, again, epochs=1))
    assert "newly initialised: nothing" in (again / "log.txt").read_text()
    labels = "\n".join(f"ox,{word}" for word in WORDS * 4)
    (tmp_path / "one.csv").write_text("text,label\n" + labels)
    finetune(settings(model, tmp_path / "one.csv", tmp_path / "one", epochs=1))
    assert "newly initialised: classifier" in (tmp_path / "one" / "log.txt").read_text()


def test_a_folder_of_an_older_version_still_works(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    """Its task file says nothing of decisions and columns of labels."""
    (tmp_path / "t.csv").write_text("text,label\n" + "good,pos\nbad,neg\n" * 10)
    finetune(settings(tiny_encoder_folder, tmp_path / "t.csv", tmp_path / "run", epochs=1))
    file = tmp_path / "run" / "model" / "bertsmith.json"
    content = json.loads(file.read_text())
    assert content["task"] == "single_label_classification"
    for key in ("label_separator", "decisions"):
        del content[key]
    del content["columns"]["labels"]
    file.write_text(json.dumps(content))
    config = EvaluateConfig(model=str(file.parent), data=str(tmp_path / "t.csv"))
    assert evaluate(config).metrics.num_examples == 20


def test_a_run_of_an_older_version_is_resumed(tmp_path: Path, tiny_encoder_folder: Path) -> None:
    """Its checkpoint knows no task, and its default monitor was accuracy."""
    (tmp_path / "t.csv").write_text("text,label\n" + "good,pos\nbad,neg\n" * 20)
    run = tmp_path / "run"
    finetune(settings(tiny_encoder_folder, tmp_path / "t.csv", run, epochs=2))
    config = read_state(newest_checkpoint(run / "checkpoints", print) or run)[1].config
    assert (config["task"], config["monitor"]) == ("classification", "accuracy")
    summary = finetune(
        settings(tiny_encoder_folder, tmp_path / "t.csv", run, epochs=2, resume=True)
    )
    assert summary.status == "completed"
