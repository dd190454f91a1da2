"""`bertsmith plan`: what it says, how fast, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith import cli
from bertsmith.errors import EXIT_USER_ERROR
from bertsmith.hf.config_json import config_json
from bertsmith.model.config import PRESETS

PRETRAIN = ["plan", "pretrain", "--model", "bert-base", "--device", "a100-40"]


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    """The JSON of a plan."""
    assert cli.run([*argv, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line of a refusal."""
    assert cli.run(list(argv)) == EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("what", ["pretrain", "finetune"])
def test_a_plan_imports_no_torch(what: str) -> None:
    program = (
        "import sys; from bertsmith.cli import run;"
        f"code = run(['plan', {what!r}, '--model', 'bert-base', '--device', '16GiB']);"
        "heavy = {'torch', 'pyarrow', 'sklearn', 'tokenizers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "peak of tensors" in done.stdout


def test_time_energy_and_cost_follow_from_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "100", "--flop_per_second", "1e14", "--price_per_hour", "2")
    times = planned(capsys, *PRETRAIN, *options)["times"]
    assert isinstance(times, dict)
    hours = times["run_seconds"] / 3600
    assert times["run_seconds"] == pytest.approx(100 * times["step_seconds"])
    assert times["cost"] == pytest.approx(2 * hours)
    assert times["kilowatt_hours"] == pytest.approx(0.4 * hours)  # 400 W
    # 8,192 tokens at 0.588 GFLOP each (base, 512 packed, head on 15 %), less 10 / 12 of the last
    # block's 42.5 MFLOP on the 85 % of tokens that no head reads.
    flop = 8192 * (0.588e9 - 0.85 * 10 / 12 * 42.5e6)
    assert times["step_seconds"] == pytest.approx(flop / 1e14, rel=0.01)


def test_what_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "6GiB", "--packing.tokens_per_pack", "8192", "--precision", "fp32")
    found = planned(capsys, "plan", "pretrain", "--model", "bert-base", *options)
    ways = {way["what"]: way for way in found["ways"]}  # type: ignore[attr-defined]
    assert not found["fits"]
    assert list(ways)[:2] == ["smaller passes, the same step", "bf16"]
    assert ways["smaller passes, the same step"]["fits"]
    assert (
        ways["full checkpointing"]["time_factor"] > ways["selective checkpointing"]["time_factor"]
    )
    assert "fsdp over 8" in ways


def test_the_way_it_advises_fits(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--device", "6GiB", "--precision", "fp32", "--model", "bert-base")
    found = planned(capsys, "plan", "pretrain", *size, "--packing.tokens_per_pack", "8192")
    words = found["ways"][0]["options"].split()  # type: ignore[index]
    assert planned(capsys, "plan", "pretrain", *size, *words)["fits"]


def test_an_impossible_budget_says_the_smallest_need(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", "pretrain", "--model", "bert-large", "--device", "1GiB")
    assert "are too little for this model" in line
    assert "it needs" in line


def test_a_run_can_be_planned_by_its_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: d\nmodel: bert-tiny\noutput: o\nsteps: 5\nmasking:\n  share: 0.3\n")
    found = planned(capsys, "plan", "--config", str(file), "--device", "16GiB")
    assert found["fits"]
    file.write_text("data: d\nmodel: bert-tiny\noutput: o\nexamples_per_step: 5\ndevice: cpu\n")
    assert planned(capsys, "plan", "--config", str(file))["device"] == "this CPU"


def test_a_model_is_read_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config_json(PRESETS["bert-mini"], task="encoder", labels=None)
    (tmp_path / "config.json").write_text(text)
    options = ("--device", "16GiB", "--labels", "2")
    by_folder = planned(capsys, "plan", "finetune", "--model", str(tmp_path), *options)
    assert by_folder == planned(capsys, "plan", "finetune", "--model", "bert-mini", *options)


def test_a_task_that_reads_every_token_takes_more(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "bert-mini", "--device", "16GiB", "--flop_per_second", "1e12")

    def of(task: str) -> tuple[int, float]:
        found = planned(capsys, "plan", "finetune", *options, "--task", task)
        times = found["times"]
        assert isinstance(times, dict)
        assert isinstance(found["plan"], dict)
        return found["plan"]["needed_bytes"], times["step_seconds"]

    first, words, answers, pairs = map(of, ("classification", "tokens", "questions", "embedding"))
    assert words[0] > first[0]
    assert words[1] > first[1]
    assert answers == words
    # Two texts a row, and a forward pass (a third of forward and backward) more.
    assert pairs[1] == pytest.approx(words[1] * 2 * 4 / 3)


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean a100-40" in refused(
        capsys, "plan", "pretrain", "--model", "bert-base", "--device", "a100-4"
    )
    assert "of what?" in refused(capsys, "plan", "--model", "bert-base")
    assert "did you mean pretrain?" in refused(capsys, "plan", "pretain", "--model", "bert-base")
    assert "does not compute it" in refused(
        capsys, "plan", "pretrain", "--model", "bert-base", "--device", "t4", "--precision", "bf16"
    )
    assert "no folder or config.json here" in refused(
        capsys, "plan", "pretrain", "--model", "./nowhere", "--device", "16GiB"
    )
