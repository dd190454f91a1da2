"""Text in, trained encoder out, by the commands a user types; and something was learned."""

import csv
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

UNIGRAM_NATS = math.log(96)
"""Loss of the best guess that ignores context: 96 words, all as frequent."""


def summary_of(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def test_prepare_counts_what_it_was_given(prepared: Path) -> None:
    manifest = json.loads((prepared / "prepared" / "manifest.json").read_text())
    texts = [
        document
        for path in (prepared / "text").iterdir()
        for document in path.read_text().strip().split("\n\n")
    ]
    assert manifest["counts"]["documents"] == len(set(texts))
    assert manifest["counts"]["duplicates"] == len(texts) - len(set(texts))


def test_pretraining_learns_what_only_context_can_tell(pretrained: Path) -> None:
    summary = summary_of(pretrained / "pretrained")
    assert summary["status"] == "completed"
    assert summary["steps"] == 300
    valid_loss = number(summary["valid_loss"])
    assert valid_loss < 0.75 * UNIGRAM_NATS
    assert valid_loss > math.log(12) - 0.1  # nobody can know more than the topic
    assert number(summary["valid_perplexity"]) == pytest.approx(math.exp(valid_loss), rel=1e-6)
    assert number(summary["real_tokens"]) > 200 * 1024
    assert number(summary["real_tokens_per_second"]) > 0
    assert number(summary["peak_memory_bytes"]) > 10_000_000
    assert {"seconds", "train_loss", "seed", "versions"} <= summary.keys()


def test_every_logged_step_is_a_line_of_metrics(pretrained: Path) -> None:
    lines = [
        json.loads(line)
        for line in (pretrained / "pretrained" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "grad_norm" in line]
    wanted = {"step", "loss", "learning_rate", "grad_norm", "real_tokens", "seconds"}
    assert all(wanted <= line.keys() for line in steps)
    numbers = [line["step"] for line in steps]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 300


@pytest.mark.parametrize("run", ["pretrained", "tuned"])
def test_a_run_folder_is_complete_and_holds_nothing_temporary(tuned: Path, run: str) -> None:
    folder = tuned / run
    for name in ("run.yaml", "metrics.jsonl", "summary.json", "log.txt", "README.md"):
        assert (folder / name).stat().st_size > 0, name
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / "model" / name).is_file(), name
    assert any((folder / "checkpoints").glob("step-*"))
    assert [p.name for p in folder.rglob("*tmp*")] == []


def test_fine_tuning_is_right_far_more_often_than_chance(tuned: Path) -> None:
    summary = summary_of(tuned / "tuned")
    assert summary["status"] == "completed"
    metrics = summary["metrics"]
    assert isinstance(metrics, dict)
    assert number(metrics["accuracy"]) > 0.9  # chance is 1 in 8


def test_evaluate_and_predict_agree_with_each_other_and_with_the_labels(
    tuned: Path, bertsmith: Run, tmp_path: Path
) -> None:
    model, table = tuned / "tuned" / "model", tuned / "test.csv"
    scored = bertsmith("evaluate", "--model", model, "--data", table, "--json")
    assert scored.returncode == 0, scored.stderr
    result = json.loads(scored.stdout)
    accuracy = result.get("metrics", result)["accuracy"]
    predicted = bertsmith(
        "predict", "--model", model, "--data", table, "--output", tmp_path / "p.csv"
    )
    assert predicted.returncode == 0, predicted.stderr
    with (tmp_path / "p.csv").open(newline="") as file:
        said = list(csv.DictReader(file))
    with table.open(newline="") as file:
        truth = list(csv.DictReader(file))
    assert [row["text"] for row in said] == [row["text"] for row in truth]
    right = sum(a["prediction"] == b["label"] for a, b in zip(said, truth, strict=True))
    assert right / len(truth) == pytest.approx(accuracy, abs=1e-9)
    assert accuracy > 0.9


def test_predict_reads_lines_from_standard_input_and_writes_to_standard_output(
    tuned: Path, bertsmith: Run
) -> None:
    with (tuned / "new.csv").open(newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    done = bertsmith("predict", "--model", tuned / "tuned" / "model", stdin="\n".join(texts) + "\n")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["text"] for row in rows] == texts


def test_preparing_again_does_nothing_and_pretraining_again_is_refused(
    pretrained: Path, bertsmith: Run
) -> None:
    folder = pretrained / "prepared"
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    again = bertsmith(
        *("prepare", "--input", pretrained / "text", "--output", folder, "--vocab_size", "300")
    )
    assert again.returncode == 0, again.stderr
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    assert before == after
