"""Fine-tuning learns, keeps the best, goes on where it stopped, and refuses what cannot work."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import pipeline

from bertsmith.checkpoint.config import SaveConfig
from bertsmith.data.windows import WindowConfig
from bertsmith.errors import UserError
from bertsmith.metrics import ClassificationMetrics
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune, main
from bertsmith.recipes.finetune_run import rank_of
from bertsmith.recipes.predict import predict
from bertsmith.recipes.texts.run import TextRun
from bertsmith.train.config import GuardConfig, OptimConfig
from bertsmith.train.guard import BadStepError
from bertsmith.train.step import train_step

MakeClassifier = Callable[..., Path]


def write_table(path: Path, count: int, *, pair: bool = False, seed: int = 0) -> Path:
    """Texts that are positive when "good" stands in them and negative when "bad" does.

    In a pair that word stands in the second text.
    """
    draw = random.Random(seed)

    def text(word: str) -> str:
        words = [*draw.choices(["film", "the", "ox", "zebra"], k=draw.randint(1, 5)), word]
        draw.shuffle(words)
        return " ".join(words)

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "text_b", "label"] if pair else ["text", "label"])
        for i in range(count):
            word, label = ("good", "pos") if i % 2 else ("bad", "neg")
            writer.writerow([text("ox"), text(word), label] if pair else [text(word), label])
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "train.csv", 160)


def settings(model: Path, data: Path, output: Path, **more: Any) -> FinetuneConfig:
    rate, parts = more.pop("learning_rate", 5e-3), more.pop("parts", {})
    optim = OptimConfig(learning_rate=rate, beta2=0.999, **parts)
    values: dict[str, Any] = {"epochs": 4, "examples_per_step": 16, "precision": "fp32"} | more
    return FinetuneConfig(
        model=str(model), data=str(data), output=str(output), optim=optim, **values
    )


def summary_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("pair", [False, True])
def test_a_task_is_learned_and_the_model_works_unchanged_in_transformers(
    tmp_path: Path, tiny_encoder_folder: Path, pair: bool
) -> None:
    data = write_table(tmp_path / "train.csv", 240, pair=pair)
    dev = write_table(tmp_path / "dev.csv", 60, pair=pair, seed=1)
    more = {"eval": str(dev), "epochs": 16, "max_sequence_tokens": 32}  # cut, as the oracle does
    config = settings(tiny_encoder_folder, data, tmp_path / "run", **more)
    assert main(config) == 0
    summary = summary_of(tmp_path / "run")
    assert summary["metrics"]["accuracy"] > 0.9
    assert summary["valid_loss"] == summary["metrics"]["loss"]

    model = tmp_path / "run" / "model"
    output = str(tmp_path / "p.jsonl")
    predict(PredictConfig(model=str(model), data=str(dev), output=output, precision="fp32"))
    rows = [json.loads(line) for line in Path(output).read_text().splitlines()]
    right = sum(r["prediction"] == r["label"] for r in rows) / len(rows)
    assert right == pytest.approx(summary["metrics"]["accuracy"])
    inputs = [{"text": r["text"], "text_pair": r["text_b"]} if pair else r["text"] for r in rows]
    oracle = pipeline("text-classification", model=str(model), top_k=None)
    for row, expected in zip(rows, oracle(inputs, truncation=True), strict=True):
        chances = {e["label"]: e["score"] for e in expected}
        assert row["probabilities"] == pytest.approx(chances, abs=2e-6)


def write_long_table(path: Path, count: int, *, seed: int) -> Path:
    """Texts of 70 words, beyond the model's 32 positions; what tells them apart is all over."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(count):
            word, label = ("good", "pos") if i % 2 else ("bad", "neg")
            words = draw.choices(["film", "the", word, word], k=70 if i % 3 else 20)
            writer.writerow([" ".join(words), label])
    return path


def test_long_texts_are_read_in_the_same_windows_in_training_and_judging_and_prediction(
    tmp_path: Path, tiny_encoder_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_long_table(tmp_path / "train.csv", 60, seed=0)
    dev = write_long_table(tmp_path / "dev.csv", 30, seed=1)
    window = WindowConfig(overlap_tokens=10, merge="max")
    config = settings(
        tiny_encoder_folder, data, tmp_path / "run", eval=str(dev), epochs=6, window=window
    )
    assert main(config) == 0
    # Windows of 30 tokens that move on by 20: a text of 70 has 3.
    said = "40 texts of more than 32 tokens are read in windows that share 10 tokens, 140 sequences"

    assert said in capsys.readouterr().err
    summary = summary_of(tmp_path / "run")
    assert (summary["cut_examples"], summary["windowed_examples"]) == (0, 40)
    assert summary["metrics"]["accuracy"] > 0.9

    model = tmp_path / "run" / "model"
    found = evaluate(EvaluateConfig(model=str(model), data=str(dev), precision="fp32"))
    assert found.metrics.by_name() == pytest.approx(summary["metrics"], abs=1e-6)
    output = tmp_path / "p.jsonl"
    predict(PredictConfig(model=str(model), data=str(dev), output=str(output), precision="fp32"))
    row = json.loads(output.read_text().splitlines()[1])
    words = row["text"].split()
    oracle = pipeline("text-classification", model=str(model), top_k=None)
    answers = oracle([" ".join(words[start : start + 30]) for start in (0, 20, 40)])
    largest = {
        name: max(one["score"] for answer in answers for one in answer if one["label"] == name)
        for name in ("neg", "pos")
    }
    expected = {name: value / sum(largest.values()) for name, value in largest.items()}
    assert row["probabilities"] == pytest.approx(expected, abs=2e-6)


def test_windows_that_hardly_move_on_are_refused(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    window = WindowConfig(overlap_tokens=16)
    config = settings(tiny_encoder_folder, table, tmp_path / "run", window=window)
    with pytest.raises(UserError, match=r"--window.overlap_tokens 16 is .* give 15 at most"):
        finetune(config)


def test_a_run_folder_holds_all_that_a_run_leaves(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    config = settings(
        tiny_encoder_folder, table, tmp_path / "run", log_every_steps=1, patience=None
    )
    finetune(config)
    run = tmp_path / "run"
    names = {p.name for p in run.iterdir()}
    assert names == {
        *("run.yaml", "metrics.jsonl", "summary.json", "log.txt", "README.md"),
        *("run_status.json", "tensorboard", "checkpoints", "model"),
    }
    wanted = {"status", "steps", "real_tokens", "real_tokens_per_second", "seconds", "train_loss"}
    wanted |= {"valid_loss", "metrics", "peak_memory_bytes", "seed", "versions"}
    summary = summary_of(run)
    assert wanted <= set(summary)
    assert (summary["train_examples"], summary["eval_examples"]) == (144, 16)
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "loss" in x]
    assert [x["step"] for x in steps] == list(range(1, 37))
    assert {"loss", "learning_rate", "grad_norm", "real_tokens", "seconds"} <= set(steps[0])
    judged = [x["step"] for x in lines if "valid_accuracy" in x]
    assert judged == [5, 10, 15, 20, 25, 30, 35, 36]
    assert yaml.safe_load((run / "run.yaml").read_text())["examples_per_step"] == 16
    log = (run / "log.txt").read_text()
    assert "held out of it" in log
    assert "newly initialised: pooler, classifier" in log


def test_the_same_seed_gives_the_same_model(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        finetune(settings(tiny_encoder_folder, table, tmp_path / name, seed=seed, epochs=1))
    a, b, c = (load_file(tmp_path / n / "model" / "model.safetensors") for n in "abc")
    assert all(a[key].equal(b[key]) for key in a)
    assert not all(a[key].equal(c[key]) for key in a)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_changes_no_weight(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, checkpointing: str
) -> None:
    for name in ("none", checkpointing):
        output = tmp_path / f"run-{name}"
        finetune(settings(tiny_encoder_folder, table, output, checkpointing=name, epochs=1))
    files = [tmp_path / f"run-{n}" / "model/model.safetensors" for n in ("none", checkpointing)]
    assert files[0].read_bytes() == files[1].read_bytes()


PARTS = [{}, {"layer_decay": 0.5, "unfreeze": "steps:4"}]
"""All alike, and rates by part with layers that thaw after 4, 8 and 12 updates."""


@pytest.mark.parametrize(("stop_after", "parts"), [(3, PARTS[0]), (8, PARTS[0]), (10, PARTS[1])])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
    parts: dict[str, Any],
) -> None:
    straight = settings(tiny_encoder_folder, table, tmp_path / "straight", epochs=2, parts=parts)
    finetune(straight)
    original = TextRun.on_report

    def stop(run: TextRun, report: Any, state: Any, progress: float) -> None:
        original(run, report, state, progress)
        if state.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TextRun, "on_report", stop)
    stopped = settings(tiny_encoder_folder, table, tmp_path / "stopped", epochs=2, parts=parts)
    assert main(stopped) == 75
    assert summary_of(tmp_path / "stopped")["status"] == "interrupted"
    monkeypatch.setattr(TextRun, "on_report", original)
    again = settings(
        tiny_encoder_folder, table, tmp_path / "stopped", epochs=2, resume=True, parts=parts
    )
    finetune(again)
    one, two = (
        load_file(tmp_path / n / "model" / "model.safetensors") for n in ("straight", "stopped")
    )
    assert all(one[key].equal(two[key]) for key in one)
    one_summary, two_summary = (summary_of(tmp_path / n) for n in ("straight", "stopped"))
    for key in ("status", "steps", "best_step", "metrics", "real_tokens"):
        assert one_summary[key] == two_summary[key], key


def test_rates_by_part_are_said_logged_and_part_of_the_run_and_frozen_parts_stay(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    run = tmp_path / "run"
    parts = {"rates": "1=2e-3,head=1e-2"}
    config = settings(
        tiny_encoder_folder, table, run, parts=parts, freeze="embeddings,0", epochs=1,
        log_every_steps=1,
    )  # fmt: skip
    finetune(config)
    said = [line.split(maxsplit=2)[-1] for line in (run / "log.txt").read_text().splitlines()]
    start = next(i for i, line in enumerate(said) if "peak rate" in line)
    assert [line.split() for line in said[start + 1 : start + 5]] == [
        ["head", "0.01", "306", "from", "the", "start"],
        ["layer", "1", "0.002", "2,224", "from", "the", "start"],
        ["layer", "0", "-", "0", "no,", "frozen"],
        ["embeddings", "-", "0", "no,", "frozen"],
    ]
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    for line in (x for x in lines if "loss" in x):
        assert line["learning_rate/head"] == pytest.approx(2 * line["learning_rate"])
        assert line["learning_rate/1"] == pytest.approx(0.4 * line["learning_rate"])
    before = load_file(tiny_encoder_folder / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    for name, values in before.items():
        ours = name if name.startswith("bert.") else f"bert.{name}"
        is_frozen = "embeddings" in name or "layer.0." in name
        assert after[ours].equal(values) == is_frozen, name
    with pytest.raises(UserError, match=r"optim.rates was 1=2e-3,head=1e-2, is null"):
        finetune(
            settings(tiny_encoder_folder, table, run, freeze="embeddings,0", epochs=1, resume=True)
        )


def scores(accuracy: float) -> ClassificationMetrics:
    return ClassificationMetrics(
        num_examples=10,
        accuracy=accuracy,
        macro_f1=0.5,
        weighted_f1=0.5,
        matthews_correlation=0.0,
        loss=accuracy,
        labels=(),
        confusion=(),
    )


@pytest.mark.parametrize(
    ("monitor", "best_step", "steps"),
    # Judged after steps 2, 4, ...: the accuracies below, and losses equal to them (lower wins). The
    # loss falls at 6 for the last time, so that two judgements in vain end at 10 either way.
    [("accuracy", 4, 10), ("loss", 6, 10)],
)
def test_the_best_model_is_kept_and_patience_ends_the_run(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    monitor: str,
    best_step: int,
    steps: int,
) -> None:
    judgements = iter([0.5, 0.9, 0.4, 0.8, 0.7, 0.6, 0.5])
    monkeypatch.setattr(TextRun, "judge", lambda run, limit: scores(next(judgements)))
    output = tmp_path / "run"
    config = settings(
        tiny_encoder_folder, table, output, monitor=monitor, patience=2, eval_every_steps=2
    )
    summary = finetune(config)
    assert (summary.status, summary.stopped_early) == ("completed", True)
    assert (summary.best_step, summary.steps) == (best_step, steps)
    assert summary.metrics["accuracy"] == {4: 0.9, 6: 0.4}[best_step]
    best_only = settings(
        tiny_encoder_folder, table, tmp_path / "other", eval_every_steps=2, patience=None
    )
    monkeypatch.setattr(
        TextRun,
        "judge",
        lambda run, limit: scores(1.0 if run.state.step == best_step else 0.0),
    )
    finetune(best_only)
    one, two = (load_file(p / "model" / "model.safetensors") for p in (output, tmp_path / "other"))
    assert all(one[key].equal(two[key]) for key in one)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"accuracy": 0.8, "loss": 9.0}, {"accuracy": 0.79, "loss": 0.1}),
        ({"accuracy": 0.8, "loss": 0.4}, {"accuracy": 0.8, "loss": 0.5}),
    ],
)
def test_accuracy_decides_and_the_loss_where_it_ties(
    better: dict[str, float], worse: dict[str, float]
) -> None:
    assert rank_of(better, "accuracy") > rank_of(worse, "accuracy")
    low, high = sorted((better, worse), key=lambda s: s["loss"])
    assert rank_of(low, "loss") > rank_of(high, "loss")


def test_a_classifier_of_the_same_labels_keeps_its_head(
    tmp_path: Path, make_classifier: MakeClassifier, table: Path
) -> None:
    model = make_classifier(labels=("neg", "pos"))
    finetune(settings(model, table, tmp_path / "same", learning_rate=0.0, epochs=1))
    before, after = (
        load_file(p / "model.safetensors") for p in (model, tmp_path / "same" / "model")
    )
    assert after["classifier.weight"].equal(before["classifier.weight"])
    other = make_classifier(labels=("no", "yes"), seed=1)
    finetune(settings(other, table, tmp_path / "other", epochs=1))
    assert "newly initialised: classifier" in (tmp_path / "other" / "log.txt").read_text()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_rows(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    config = settings(tiny_encoder_folder, table, tmp_path / "run", learning_rate=1e30)
    with pytest.raises(UserError, match=r"of step \d+ is not finite .*train.csv:\d+ \(row \d+\)"):
        finetune(config)
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_examples_in_both_parts_are_counted_and_said(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    config = settings(tiny_encoder_folder, table, tmp_path / "run", eval=str(table), epochs=1)
    assert finetune(config).leaked_examples == 160
    assert "the scores flatter" in (tmp_path / "run" / "log.txt").read_text()


def test_labels_that_are_lists_of_labels_are_warned_about(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    lines = ["text,label", *(f'ox film,"{w}"' for w in ("a", "b", "a,b") for _ in range(5))]
    data = tmp_path / "many.csv"
    data.write_text("\n".join(lines))
    run = tmp_path / "run"
    finetune(settings(tiny_encoder_folder, data, run, epochs=1, task="classification"))
    assert "1 labels such as 'a,b' look like several" in (tmp_path / "run/log.txt").read_text()


def test_a_run_is_not_replaced_while_its_model_is_what_is_read(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    run = tmp_path / "run"
    finetune(settings(tiny_encoder_folder, table, run, epochs=1))
    with pytest.raises(UserError, match=r"holds --model .*run/model; name a new folder"):
        finetune(settings(run / "model", table, run, overwrite=True))
    assert (run / "model" / "config.json").exists()
    finetune(settings(run / "model", table, tmp_path / "next", epochs=1))
    assert "newly initialised: nothing" in (tmp_path / "next" / "log.txt").read_text()


def test_a_misspelt_monitor_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys; from bertsmith.recipes.config import FinetuneConfig\n"
        "try: FinetuneConfig(model='m', data='d', output='o', monitor='acuracy')\n"
        "except ValueError as error: print(error)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("'acuracy'", "accuracy", "macro_f1", "weighted_f1", "matthews_correlation"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eval": "dev.csv"}, r"dev.csv:2 \(row 1\): the label 'fine' does not occur"),
        ({"max_sequence_tokens": 33}, "must be from 3 to 32"),
        ({"checkpointing": "every:3"}, "--checkpointing every:3: the model has 2 blocks"),
        ({"freeze": "embeddings,0-2"}, "--freeze embeddings,0-2: there is no layer 2"),
        ({"parts": {"rates": "3=1e-5"}}, "--optim.rates there is no layer 3"),
        ({"data": "one.csv"}, "every row has the label 'pos'"),
        ({"output": "taken"}, "no run"),
        ({"model": "absent/model"}, "absent"),
        ({"model": "classifier-0"}, "7 tokens|tokenizer"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    make_classifier: MakeClassifier,
    table: Path,
    change: dict[str, Any],
    says: str,
) -> None:
    (tmp_path / "dev.csv").write_text("text,label\ngood,fine\n")
    (tmp_path / "one.csv").write_text("text,label\ngood,pos\nthe,pos\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("do not lose me")
    broken = make_classifier(labels=("neg", "pos"))
    vocabulary = json.loads((broken / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["zebra"] = 70
    (broken / "tokenizer.json").write_text(json.dumps(vocabulary))
    paths = {"model": tiny_encoder_folder, "data": table, "output": tmp_path / "run"}
    more: dict[str, Any] = {}
    for key, value in change.items():
        if key in paths:
            paths[key] = tmp_path / value
        else:
            more[key] = str(tmp_path / value) if key == "eval" else value
    with pytest.raises(UserError, match=says):
        finetune(settings(paths["model"], paths["data"], paths["output"], **more))
    assert (tmp_path / "taken" / "thesis.txt").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_a_bad_step_that_is_gone_back_from_ends_as_one_that_was_passed_over(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the token table go back too, though only some of them are trained."""
    ends = []
    for policy in ("rollback", "skip"):
        tried = [0]

        def step(*args: Any, tried: list[int] = tried, **more: Any) -> Any:
            if more["step"] == 7 and not tried[0]:
                tried[0] = 1
                raise BadStepError(step=7, pack=0, what="loss", how="is not finite")
            return train_step(*args, **more)

        config = settings(
            tiny_encoder_folder,
            table,
            tmp_path / policy,
            steps=10,
            patience=None,
            save=SaveConfig(every_steps=3, every_minutes=None, keep_last=9),
            guard=GuardConfig(non_finite=policy),
        )
        with monkeypatch.context() as patch:
            patch.setattr("bertsmith.train.loop.train_step", step)
            summary = finetune(config)
        assert summary.skipped_steps == [8]
        path = tmp_path / policy / "checkpoints" / "step-10" / "model.safetensors"
        ends.append(path.read_bytes())
    assert ends[0] == ends[1]
