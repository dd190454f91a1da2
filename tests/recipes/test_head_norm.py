"""Fine-tuning with a norm in the head: learned, resumed, judged, saved for transformers or not."""

import csv
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

from bertsmith import cli
from bertsmith.hf import load_classifier
from bertsmith.model.config import HeadConfig, HeadNorm
from bertsmith.model.head_norm import BatchNorm
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune, main
from bertsmith.recipes.predict import predict
from bertsmith.recipes.texts.run import TextRun
from bertsmith.train.config import OptimConfig


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Texts that are positive when "good" stands in them and negative when "bad" does."""
    draw = random.Random(0)
    path = tmp_path / "train.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(240):
            words = [
                *draw.choices(["film", "the", "ox"], k=draw.randint(1, 5)),
                "good bad"[i % 2 :],
            ]
            words[-1] = ("good", "bad")[i % 2]
            draw.shuffle(words)
            writer.writerow([" ".join(words), ("pos", "neg")[i % 2]])
    return path


def settings(
    model: Path, data: Path, output: Path, norm: HeadNorm = "batch", **more: Any
) -> FinetuneConfig:
    optim = OptimConfig(learning_rate=more.pop("learning_rate", 5e-3), beta2=0.999)
    values: dict[str, Any] = {"epochs": 12, "examples_per_step": 16, "precision": "fp32"} | more
    return FinetuneConfig(
        model=str(model),
        data=str(data),
        output=str(output),
        head=HeadConfig(norm=norm),
        optim=optim,
        **values,
    )


def predictions(model: Path, data: Path, output: Path) -> list[dict[str, Any]]:
    predict(PredictConfig(model=str(model), data=str(data), output=str(output), precision="fp32"))
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_a_task_is_learned_judged_and_predicted(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, norm: HeadNorm
) -> None:
    summary = finetune(settings(tiny_encoder_folder, table, tmp_path / "run", norm))
    model = tmp_path / "run" / "model"
    assert summary.metrics["accuracy"] > 0.9
    found = evaluate(EvaluateConfig(model=str(model), data=str(table), precision="fp32"))
    rows = predictions(model, table, tmp_path / "predictions.jsonl")
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert found.metrics.by_name()["accuracy"] == pytest.approx(right / len(rows))
    assert right / len(rows) > 0.9
    log, card = ((tmp_path / "run" / name).read_text() for name in ("log.txt", "README.md"))
    if norm == "layer":
        assert "it will refuse model/" in log
        assert "bertsmith predict --model model" in card
        assert "from transformers" not in card
        with pytest.raises(ValueError, match="`bertsmith-bert`"):
            pipeline("text-classification", model=str(model))
        return
    assert "it will refuse" not in log
    assert "from transformers import pipeline" in card
    oracle = pipeline("text-classification", model=str(model), top_k=None)
    texts = [row["text"] for row in rows]
    for row, expected in zip(rows, oracle(texts, truncation=True), strict=True):
        chances = {e["label"]: e["score"] for e in expected}
        assert row["probabilities"] == pytest.approx(chances, abs=2e-6)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    norm: HeadNorm,
) -> None:
    finetune(settings(tiny_encoder_folder, table, tmp_path / "straight", norm, epochs=2))
    original = TextRun.on_report

    def stop(run: TextRun, report: Any, state: Any, progress: float) -> None:
        original(run, report, state, progress)
        if state.step == 9:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TextRun, "on_report", stop)
    stopped = settings(tiny_encoder_folder, table, tmp_path / "stopped", norm, epochs=2)
    assert main(stopped) == 75
    monkeypatch.setattr(TextRun, "on_report", original)
    resumed = settings(
        tiny_encoder_folder, table, tmp_path / "stopped", norm, epochs=2, resume=True
    )
    finetune(resumed)
    for name in ("model.safetensors", "head.safetensors"):
        for place in ("model", "checkpoints/step-28"):
            one, two = (load_file(tmp_path / n / place / name) for n in ("straight", "stopped"))
            assert set(one) == set(two)
            assert all(one[key].equal(two[key]) for key in one), (place, name)


def test_fine_tuning_on_keeps_the_norm_and_what_it_learned(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    finetune(settings(tiny_encoder_folder, table, tmp_path / "first", epochs=2))
    first, _ = load_classifier(tmp_path / "first" / "model", labels=None)
    assert isinstance(first.head_norm, BatchNorm)
    assert not torch.equal(first.head_norm.running_var, torch.ones(16))
    finetune(settings(tmp_path / "first", table, tmp_path / "second", epochs=1, learning_rate=0.0))
    second, _ = load_classifier(tmp_path / "second" / "model", labels=None)
    assert isinstance(second.head_norm, BatchNorm)
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert torch.equal(first.head_norm.weight, second.head_norm.weight)
    assert not torch.equal(first.head_norm.running_mean, second.head_norm.running_mean)
    assert "newly initialised: nothing" in (tmp_path / "second" / "log.txt").read_text()


def test_the_option_is_explained_and_a_wrong_value_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["finetune", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--head.norm {none,batch,layer} Normalisation of the pooled vector" in shown
    words = ["finetune", "--model", "m", "--data", "d", "--output", "o", "--head.norm", "group"]
    assert cli.run(words) == 2
    assert "--head.norm: 'group' is not one of none, batch, layer" in capsys.readouterr().err
