"""What a run leaves behind whose other rank fails, whose memory is full, or whose folder is taken.

Faults 14, 19 and 23 of the list in `docs/reliability.md`, as far as they meet what is on disk.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from bertsmith.errors import EXIT_USER_ERROR
from bertsmith.report.run_lock import LOCK_FILE, lock_text, this_process
from fault_harness.runs import checkpoints_of, fault, metrics_of, until, whole_checkpoints
from fault_harness.world import World

HURRIED = """
import bertsmith.parallel.heart as heart
heart.GRACE_SECONDS, heart.BEAT_SECONDS = 0.2, 0.05
"""
"""For ranks that have to leave for another's sake; a save takes longer than that below."""

SLOW_SAVE = fault("fsync", "sleep:0.4", path=r"\.tmp-step-4", last=0)


def test_a_save_comes_to_its_end_though_another_rank_has_failed(
    world: World, tmp_path: Path
) -> None:
    fails = fault("bertsmith.train.step:train_step", "memory", nth=6, rank=1)
    words = world.pretrain(tmp_path / "run")
    ranks = world.zygote.start_ranks(words, SLOW_SAVE, fails, before=HURRIED)
    for rank in ranks:
        rank.end().must(EXIT_USER_ERROR)  # want of memory outside of a pass is told in a line
    assert whole_checkpoints(tmp_path / "run") == [4]
    status = json.loads((tmp_path / "run" / "run_status.json").read_bytes())
    assert (status["status"], status["checkpoint"]) == ("failed", "checkpoints/step-4")


def test_a_rank_without_memory_under_fsdp_ends_all_with_one_line_that_goes_on(
    world: World, tmp_path: Path
) -> None:
    full = fault("bertsmith.model.encoder:Block.forward", "memory", nth=22, rank=1)
    words = world.pretrain(tmp_path / "run", "--parallel.strategy", "fsdp")
    ranks = world.zygote.start_ranks(words, full)
    ended = [rank.end().must(EXIT_USER_ERROR) for rank in ranks]
    errors = "".join(one.errors for one in ended)
    assert errors.count("bertsmith: error:") == 1
    assert "on rank 1" in errors
    assert "--resume --micro_batch 64" in errors  # packs have 128 tokens
    assert "Traceback" not in errors
    again = world.pretrain(tmp_path / "run", "--resume", "--micro_batch", "64")
    world.zygote.run(again).must()


def test_a_run_whose_folder_is_taken_over_writes_nothing_more_there(
    world: World, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow = fault("bertsmith.train.step:train_step", "sleep:0.05", last=0)
    started = world.zygote.start(world.pretrain(run, "--save.every_steps", "8"), slow)
    until(lambda: len(metrics_of(run)) >= 3, started)
    thief = lock_text(replace(this_process(), host="thief"))
    (run / "mine").write_bytes(thief)
    (run / "mine").replace(run / LOCK_FILE)
    before = shutil.copytree(run, tmp_path / "before")
    ended = started.end().must(EXIT_USER_ERROR)
    assert ended.errors.count("taken over by process") == 1
    assert (run / LOCK_FILE).read_bytes() == thief
    assert checkpoints_of(run) == checkpoints_of(before)
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert (run / "run_status.json").read_bytes() == (before / "run_status.json").read_bytes()
    assert {path.name for path in run.iterdir()} == {path.name for path in before.iterdir()}
