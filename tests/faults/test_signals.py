"""A run that is told to stop saves the step that all ranks are at, says how to go on, and exits 75.

Faults 15 to 17 of the list in `docs/reliability.md`. A hung rank, a cut cable and a rank that
raises (18, 19, 20, 21, 22) are in `tests/end_to_end` and `tests/parallel`.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import EXIT_INTERRUPTED
from fault_harness.runs import (
    PATIENCE_SECONDS,
    Started,
    environment_with,
    fault,
    final_hashes,
    lines_of,
    metrics_of,
    until,
    whole_checkpoints,
)
from fault_harness.world import STEPS, World

SAVE_SECONDS = 10.0
"""From the signal to the end of the last rank."""

SLOW = fault("bertsmith.train.step:train_step", "sleep:0.05", last=0)
ONLY_WHEN_TOLD = ("--save.every_steps", "100")


def status_of(run: Path) -> dict[str, Any]:
    """run_status.json."""
    status: dict[str, Any] = json.loads((run / "run_status.json").read_bytes())
    return status


def stop(ranks: Sequence[Started], run: Path, told: Started, numbers: Sequence[int]) -> None:
    """Send signals 50 ms apart once three steps are done; all ranks have to stop in time."""
    until(lambda: len(metrics_of(run)) >= 3, told)
    sent_at_seconds = time.monotonic()
    for number in numbers:
        told.kill(number)
        time.sleep(0.05)
    for rank in ranks:
        rank.end(within_seconds=PATIENCE_SECONDS).must(EXIT_INTERRUPTED)
    assert time.monotonic() - sent_at_seconds < SAVE_SECONDS


def argv_of(status: dict[str, Any]) -> list[str]:
    """The told command without what starts it, which may be torchrun."""
    words = shlex.split(status["command"])
    return words[words.index("bertsmith") + 1 :]


def check_resumable(world: World, run: Path) -> None:
    """One whole checkpoint, of the step that is told; the told command goes on to the same end."""
    status = status_of(run)
    assert status["status"] == "resumable"
    assert whole_checkpoints(run)[-1] == status["step"]
    assert status["checkpoint"] == f"checkpoints/step-{status['step']}"
    world.zygote.run(argv_of(status)).must()
    assert status_of(run)["status"] == "completed"
    assert final_hashes(run) == final_hashes(world.pretrained)
    assert lines_of(run) == lines_of(world.pretrained)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_stops_one_process_with_its_step_saved(
    number: signal.Signals, world: World, tmp_path: Path
) -> None:
    run = world.zygote.start(world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD), SLOW)
    stop([run], tmp_path / "run", run, [number])
    check_resumable(world, tmp_path / "run")


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)])
def test_a_signal_to_any_one_rank_stops_all_at_the_same_step(
    number: signal.Signals, rank: int, world: World, tmp_path: Path
) -> None:
    words = world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD)
    ranks = world.zygote.start_ranks(words, SLOW)
    until(lambda: len(metrics_of(tmp_path / "run")) >= 1, ranks[0])
    stop(ranks, tmp_path / "run", ranks[rank], [number])
    check_resumable(world, tmp_path / "run")


@pytest.mark.parametrize(
    ("function", "nth"),
    [("MaskedLM.nats_and_right_M", 1), ("MaskedLM.forward", 5), ("MaskedLM.nats_and_right_M", 4)],
)
def test_a_signal_to_one_rank_inside_a_step_or_an_evaluation_stops_all(
    function: str, nth: int, world: World, tmp_path: Path
) -> None:
    """At the exact call, on rank 1 alone."""
    told = fault(f"bertsmith.model.heads:{function}", "signal:SIGTERM", nth=nth, rank=1)
    words = world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD, "--eval.every_steps", "3")
    for rank in world.zygote.start_ranks(words, told):
        rank.end().must(EXIT_INTERRUPTED)
    status = status_of(tmp_path / "run")
    assert status["status"] == "resumable"
    assert 0 < status["step"] < STEPS
    world.zygote.run(argv_of(status)).must()
    whole = world.pretrain(tmp_path / "whole", "--eval.every_steps", "3")
    world.zygote.run(whole).must()
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


def test_a_signal_inside_accumulation_of_one_process(world: World, tmp_path: Path) -> None:
    """The second pack of the sixth step: it is finished, or done over from its first pack."""
    told = fault("bertsmith.model.heads:MaskedLM.forward", "signal:SIGTERM", nth=12)
    words = world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD)
    world.zygote.run(words, told).must(EXIT_INTERRUPTED)
    check_resumable(world, tmp_path / "run")
    assert whole_checkpoints(tmp_path / "run")[0] in (5, 6)


def test_more_signals_during_the_save_do_no_harm(world: World, tmp_path: Path) -> None:
    """Two SIGTERM 50 ms apart, then SIGINT, while each flush takes long."""
    slow_disk = fault("fsync", "sleep:0.1", path=r"\.tmp-step-", last=0)
    run = world.zygote.start(world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD), SLOW, slow_disk)
    numbers = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    stop([run], tmp_path / "run", run, numbers)
    check_resumable(world, tmp_path / "run")


def test_a_signal_before_the_first_step_is_not_lost(world: World, tmp_path: Path) -> None:
    """While the model is being made: stopped without a step, or killed; then it starts anew."""
    told = fault("bertsmith.model.heads:initialize", "signal:SIGTERM")
    words = world.pretrain(tmp_path / "run")
    ended = world.zygote.run(words, told)
    assert ended.code in (EXIT_INTERRUPTED, -signal.SIGTERM), ended.errors
    world.zygote.run([*words, "--resume"]).must()
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_a_signal_to_another_rank_before_the_first_step_leaves_a_run_to_go_on_with(
    world: World, tmp_path: Path
) -> None:
    """After the first lines, while the machine is measured."""
    told = fault("bertsmith.recipes.pretrain_run:PretrainRun.new_log", "signal:SIGTERM", rank=1)
    words = world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD)
    for rank in world.zygote.start_ranks(words, told):
        rank.end().must(EXIT_INTERRUPTED)
    assert status_of(tmp_path / "run")["step"] == 0
    check_resumable(world, tmp_path / "run")


def test_the_warning_of_a_scheduler_to_the_launcher_reaches_the_ranks(
    world: World, tmp_path: Path
) -> None:
    """SIGUSR1; for SIGTERM see `tests/end_to_end/test_several_ranks.py`."""
    words = world.pretrain(tmp_path / "run", *ONLY_WHEN_TOLD, "--parallel.devices", "2")
    with subprocess.Popen(
        [sys.executable, "-m", "bertsmith", *words],
        env=environment_with(SLOW),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while len(metrics_of(tmp_path / "run")) < 3:
            assert launcher.poll() is None, launcher.communicate()[1]
            assert time.monotonic() < give_up
            time.sleep(0.01)
        launcher.send_signal(signal.SIGUSR1)
        _, errors = launcher.communicate(timeout=SAVE_SECONDS + 20.0)
    assert launcher.returncode == EXIT_INTERRUPTED, errors
    check_resumable(world, tmp_path / "run")


def test_a_killed_worker_is_started_again_by_torchrun_and_the_end_is_the_same(
    world: World, tmp_path: Path
) -> None:
    """Within 30 s: the whole group starts again and finds the last whole checkpoint by itself."""
    killed = fault(
        "bertsmith.train.step:train_step", "kill", nth=10, rank=1, once=str(tmp_path / "killed")
    )
    words = world.pretrain(tmp_path / "run", "--resume", "true")
    started_at_seconds = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("-m", "bertsmith", *words),
        ],
        env=environment_with(killed),
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert re.search(r"resumed from .*/step-(4|8)\b", done.stderr)
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert lines_of(tmp_path / "run") == lines_of(world.pretrained)
    assert time.monotonic() - started_at_seconds < 2 * PATIENCE_SECONDS
    assert os.environ.get("BERTSMITH_TEST_FAULT") is None
