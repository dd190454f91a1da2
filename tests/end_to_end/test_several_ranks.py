"""Several processes train one model: the same bytes as one, one voice, and one end for all."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from ranks import ends_of, free_port, start_ranks

Run = Callable[..., subprocess.CompletedProcess[str]]

END_SECONDS = 30.0
"""In which every rank ends once one has failed."""

START_SECONDS = 60.0
"""Allowed on top for starting Python and torch on a busy machine."""

TWO = ("--parallel.devices", "2")


def pretrain_words(root: Path, output: Path, *more: str) -> list[str]:
    return [
        *("pretrain", "--data", str(root / "prepared"), "--model", str(root / "shape.json")),
        *("--output", str(output), "--steps", "12", "--tokens_per_step", "1024"),
        *("--packing.tokens_per_pack", "512", "--packing.max_sequence_tokens", "64"),
        *("--precision", "fp32", "--device", "cpu", "--log_every_steps", "1"),
        *("--save.every_steps", "4", "--eval.every_steps", "6"),
        *more,
    ]


def finetune_words(root: Path, output: Path, *more: str) -> list[str]:
    return [
        *("finetune", "--model", str(root / "pretrained" / "model")),
        *("--data", str(root / "train.csv"), "--eval", str(root / "dev.csv")),
        *("--output", str(output), "--steps", "15", "--precision", "fp32", "--device", "cpu"),
        *("--optim.learning_rate", "2e-3", "--log_every_steps", "1", "--eval_every_steps", "7"),
        *more,
    ]


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def lines_of(run: Path, *keys: str) -> list[tuple[Any, ...]]:
    lines = (json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(key) for key in ("step", *keys)) for line in lines]


@pytest.fixture(scope="module")
def single(prepared: Path, bertsmith: Run) -> Path:
    """The run of one process that the others have to equal."""
    output = prepared / "single"
    done = bertsmith(*pretrain_words(prepared, output))
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_pretraining_on_two_ranks_is_that_of_one_process_to_the_bit(
    strategy: str, prepared: Path, single: Path, bertsmith: Run, tmp_path: Path
) -> None:
    words = pretrain_words(prepared, tmp_path / "run", *TWO, "--parallel.strategy", strategy)
    done = bertsmith(*words)
    assert done.returncode == 0, done.stderr
    assert f"parallel: {strategy} over 2 ranks" in done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "run" / "model")]
    assert done.stderr.count("step 12: validation loss") == 1
    assert weights_of(tmp_path / "run") == weights_of(single)
    keys = ("loss", "grad_norm", "real_tokens", "valid_loss", "valid_accuracy")
    assert lines_of(tmp_path / "run", *keys) == lines_of(single, *keys)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert 0.0 <= summary["idle_share"] < 0.05


POOR_RANK = """
import os
if os.environ.get("RANK") == "1":
    import sys, torch
    from bertsmith.model.heads import MaskedLM
    forward, passes = MaskedLM.forward, []
    def short_of_memory(self, batch, **how):
        passes.append(batch)
        if batch.num_tokens > 300 and len(passes) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forward(self, batch, **how)
    MaskedLM.forward = short_of_memory
"""
"""Of a process's start: after six passes, large ones find no memory on one rank."""


def test_ranks_that_wait_for_each_other_in_a_pass_start_again_with_smaller_ones(
    prepared: Path, single: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(POOR_RANK)
    words = pretrain_words(prepared, tmp_path / "run", *TWO, "--parallel.strategy", "fsdp")
    done = subprocess.run(
        [sys.executable, "-m", "bertsmith", *words, "--overwrite"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "out of memory at step" in done.stderr
    assert "started again with --resume --overwrite=false --micro_batch=256" in done.stderr
    for key in ("loss", "valid_loss"):  # a line has one of them
        one, two = ([x for x in lines_of(run, key) if x[1]] for run in (single, tmp_path / "run"))
        assert two == [(step, pytest.approx(value, rel=1e-5)) for step, value in one]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fine_tuning_on_two_ranks_is_that_of_one_process(
    strategy: str, pretrained: Path, bertsmith: Run, tmp_path: Path
) -> None:
    """80 examples to judge by, in packs that two ranks share: each counts once."""
    packs = ("--tokens_per_pack", "128")
    for name, more in (("one", ()), ("two", (*TWO, "--parallel.strategy", strategy))):
        done = bertsmith(*finetune_words(pretrained, tmp_path / name, *packs, *more))
        assert done.returncode == 0, done.stderr
    keys = ("loss", "valid_loss", "valid_accuracy", "valid_macro_f1")
    one, two = (lines_of(tmp_path / name, *keys) for name in ("one", "two"))
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        for a, b in zip(left, right, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b == pytest.approx(a, rel=2e-6)


def test_a_run_of_two_ranks_is_interrupted_and_goes_on_alone(
    prepared: Path, bertsmith: Run, tmp_path: Path
) -> None:
    for name in ("whole", "stopped"):
        words = pretrain_words(prepared, tmp_path / name, "--overwrite")
        words[words.index("--steps") + 1] = "150"
        words[words.index("--log_every_steps") + 1] = "1"
        if name == "whole":
            assert bertsmith(*words).returncode == 0
            continue
        with subprocess.Popen(
            [sys.executable, "-m", "bertsmith", *words, *TWO],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            wait_for_step(tmp_path / name, 3, process)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=END_SECONDS + START_SECONDS)
        assert process.returncode == EXIT_INTERRUPTED, errors
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert 3 <= summary["steps"] < 150
        words.remove("--overwrite")
        assert bertsmith(*words, "--resume").returncode == 0
    assert weights_of(tmp_path / "stopped") == weights_of(tmp_path / "whole")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a run has logged a step."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(lines_of(run)) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.poll()}")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--parallel.devices", "999"), "this machine has"),
        ((*TWO, "--parallel.strategy", "dp"), "on the CPU it would do nothing; use ddp"),
        ((*TWO, "--parallel.strategy", "none"), "uses one device, not 2"),
        (("--parallel.strategy", "fsdp"), "with one device has nothing to share"),
        ((*TWO, "--packing.tokens_per_pack", "1024"), "2 devices cannot share evenly"),
        ((*TWO, "--data", "nowhere"), "nowhere: not a prepared folder"),
        ((*TWO, "--minutes", "1"), "(given: --steps, --minutes)"),  # before the ranks meet
    ],
)
def test_a_mistake_is_one_line_however_many_ranks_there_are(
    more: Sequence[str], line: str, prepared: Path, bertsmith: Run, tmp_path: Path
) -> None:
    done = bertsmith(*pretrain_words(prepared, tmp_path / "run", *more))
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert line in done.stderr
    assert done.stderr.count("bertsmith: error:") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


FAULT = """
import os, signal, time
import bertsmith.train.loop as loop
real = loop.train_step
def faulty(*args, step, **more):
    if step == 3 and os.environ["RANK"] == "1":
        time.sleep(2.5)  # a heart tells once a second where its rank is
        {what}
    return real(*args, step=step, **more)
loop.train_step = faulty
"""


def test_a_rank_that_fails_is_named_once_and_all_end(prepared: Path, tmp_path: Path) -> None:
    broken = FAULT.format(what='raise ValueError("broken on purpose")')
    words = pretrain_words(prepared, tmp_path / "run")
    ends = ends_of(
        start_ranks(words, before=broken), wait_for=2, seconds=END_SECONDS + START_SECONDS
    )
    assert [code for code, _ in ends] == [1, 1]
    told = "".join(errors for _, errors in ends)
    assert told.count("Traceback") == 1
    assert told.count("broken on purpose") == 1
    assert "rank 1 failed" in ends[1][1]


def test_a_killed_rank_is_named_and_the_other_ends(prepared: Path, tmp_path: Path) -> None:
    killed = FAULT.format(what="os.kill(os.getpid(), signal.SIGKILL)")
    words = pretrain_words(prepared, tmp_path / "run")
    ends = ends_of(
        start_ranks(words, before=killed), wait_for=2, seconds=END_SECONDS + START_SECONDS
    )
    assert [code for code, _ in ends] == [1, -signal.SIGKILL]
    assert "rank 1 stopped answering, last seen at step 4" in ends[0][1]
    assert "Traceback" not in ends[0][1]


def test_a_stopped_rank_is_named_within_the_timeout(prepared: Path, tmp_path: Path) -> None:
    stopped = FAULT.format(what="os.kill(os.getpid(), signal.SIGSTOP)")
    words = pretrain_words(prepared, tmp_path / "run", "--parallel.timeout_seconds", "5")
    ranks = start_ranks(words, before=stopped)
    ends = ends_of(ranks, wait_for=1, seconds=END_SECONDS + START_SECONDS)
    assert ends[0][0] == 1
    assert "rank 1 stopped answering, last seen at step 4" in ends[0][1]


def test_ranks_with_other_settings_are_refused(prepared: Path, tmp_path: Path) -> None:
    words = pretrain_words(prepared, tmp_path / "run", "--seed", "{rank}")
    ends = ends_of(start_ranks(words), wait_for=2, seconds=END_SECONDS + START_SECONDS)
    assert [code for code, _ in ends] == [EXIT_USER_ERROR] * 2
    told = "".join(errors for _, errors in ends)
    assert told.count("bertsmith: error:") == 1
    # Either may be the one that says it.
    assert "ranks differ in code and settings: seed is 0 on rank 0 and 1 on rank 1" in told


def test_ranks_that_read_other_weights_are_refused(prepared: Path, tmp_path: Path) -> None:
    """A checkpoint on each node's own disk, one of them old: DDP would hide it, FSDP mix them."""
    other = """
import os
from bertsmith.recipes import pretrain
make = pretrain.make_masked_lm
def made(*args, **kwargs):
    model = make(*args, **kwargs)
    if os.environ["RANK"] == "1":
        next(model.parameters()).data.view(-1)[0] += 1e-3
    return model
pretrain.make_masked_lm = made
"""
    words = pretrain_words(prepared, tmp_path / "run")
    ends = ends_of(
        start_ranks(words, before=other), wait_for=2, seconds=END_SECONDS + START_SECONDS
    )
    assert [code for code, _ in ends] == [EXIT_USER_ERROR] * 2
    told = "".join(errors for _, errors in ends)
    assert told.count("ranks differ in starting weights: checksum of the weights is") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_rank_is_named(prepared: Path, tmp_path: Path) -> None:
    words = pretrain_words(prepared, tmp_path / "run", "--parallel.join_seconds", "3")
    ranks = start_ranks(words, size=3)
    ranks[2].kill()
    ends = ends_of(ranks, wait_for=2, seconds=END_SECONDS + START_SECONDS)
    assert [code for code, _ in ends] == [EXIT_USER_ERROR] * 2
    told = "".join(errors for _, errors in ends)
    assert told.count("of 3 ranks these are missing: 2") == 1


def test_a_busy_port_is_said(prepared: Path, tmp_path: Path) -> None:
    words = pretrain_words(prepared, tmp_path / "run", "--parallel.join_seconds", "3")
    port = free_port()
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", port))
        holder.listen()
        ends = ends_of(
            start_ranks(words, port=port), wait_for=1, seconds=END_SECONDS + START_SECONDS
        )
    assert ends[0][0] == EXIT_USER_ERROR
    assert f"rank 0 cannot listen at 127.0.0.1:{port}" in ends[0][1]
