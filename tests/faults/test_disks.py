"""A disk that is full, broken, read-only or slow: the last good state stays, and it is said.

Faults 6 to 8 of the list in `docs/reliability.md`.
"""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bertsmith.errors import EXIT_INTERRUPTED
from fault_harness.attacks import PACED, TRAIN_STEP
from fault_harness.runs import (
    checkpoints_of,
    fault,
    final_hashes,
    lines_of,
    metrics_of,
    until,
    whole_checkpoints,
)
from fault_harness.world import STEPS, World

CONTINUE = ("--save.on_disk_error", "continue")
STOP = ("--save.on_disk_error", "stop")
AT_THE_SECOND_SAVE = r"\.tmp-step-8"


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes; skips the test where it cannot be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def checkpoint_bytes(world: World) -> int:
    """Size of one checkpoint."""
    files = (world.pretrained / "checkpoints" / f"step-{STEPS}").iterdir()
    return sum(path.stat().st_size for path in files)


def test_a_full_disk_stops_no_training_and_the_next_save_is_tried_again(
    world: World, checkpoint_bytes: int, tmp_path: Path
) -> None:
    """Room for two checkpoints and a half; then somebody makes room."""
    with small_disk(tmp_path / "disk", size_bytes=int(4.6 * checkpoint_bytes)) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(int(2.1 * checkpoint_bytes)))
        words = world.pretrain(disk / "run", *CONTINUE)
        run = world.zygote.start(words, fault(TRAIN_STEP, "sleep:0.15", last=0))
        until(lambda: "free" in run.errors() and "bytes" in run.errors(), run)
        assert whole_checkpoints(disk / "run") == checkpoints_of(disk / "run")
        assert whole_checkpoints(disk / "run"), "the last good one is gone"
        ballast.unlink()
        run.end().must()
        assert final_hashes(disk / "run") == final_hashes(world.pretrained)
        assert lines_of(disk / "run") == lines_of(world.pretrained)
        assert not list((disk / "run" / "checkpoints").glob(".tmp-*"))


def test_a_full_disk_ends_the_run_resumable_where_it_is_asked_for(
    world: World, checkpoint_bytes: int, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=int(4.6 * checkpoint_bytes)) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(int(3.1 * checkpoint_bytes)))
        words = world.pretrain(disk / "run", *STOP)
        ended = world.zygote.run(words, *PACED).must(EXIT_INTERRUPTED)
        assert "Traceback" not in ended.errors
        kept = whole_checkpoints(disk / "run")
        assert kept == checkpoints_of(disk / "run")
        ballast.unlink()
        world.zygote.run([*words, "--resume"]).must()
        assert final_hashes(disk / "run") == final_hashes(world.pretrained)
        assert lines_of(disk / "run") == lines_of(world.pretrained)


@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EROFS"])
def test_an_error_of_the_disk_during_a_save_is_a_line_and_never_a_checkpoint(
    number: str, world: World, tmp_path: Path
) -> None:
    broken = fault("fsync", number, path=AT_THE_SECOND_SAVE, nth=2)
    words = world.pretrain(tmp_path / "run", *CONTINUE, "--save.keep_last", "9")
    done = world.zygote.run(words, broken, *PACED).must()
    assert "step-8" in done.errors
    assert "Traceback" not in done.errors
    assert whole_checkpoints(tmp_path / "run") == checkpoints_of(tmp_path / "run") == [4, 12, 16]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_under_the_policy_stop_the_run_goes_on_from_the_last_good_one(
    world: World, tmp_path: Path
) -> None:
    broken = fault("rename", "EIO", path="/step-8$")
    words = world.pretrain(tmp_path / "run", *STOP)
    ended = world.zygote.run(words, broken, *PACED).must(EXIT_INTERRUPTED)
    assert "Traceback" not in ended.errors
    assert whole_checkpoints(tmp_path / "run") == checkpoints_of(tmp_path / "run") == [4]
    again = world.zygote.run([*words, "--resume"]).must()
    assert "resumed from" in again.errors
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert lines_of(tmp_path / "run") == lines_of(world.pretrained)


def test_a_disk_that_fails_under_the_metrics_is_said_and_the_run_goes_on_or_can_go_on(
    world: World, tmp_path: Path
) -> None:
    """The line may be lost, but a resumed run writes it: without a gap and without a double."""
    broken = fault("write", "ENOSPC", path=r"metrics\.jsonl$", nth=7, last=0)
    words = world.pretrain(tmp_path / "run")
    ended = world.zygote.run(words, broken)
    assert "Traceback" not in ended.errors
    assert "metrics.jsonl" in ended.errors
    assert whole_checkpoints(tmp_path / "run") == checkpoints_of(tmp_path / "run")
    assert whole_checkpoints(tmp_path / "run")
    if ended.code:
        world.zygote.run([*words, "--resume"]).must()
        assert lines_of(tmp_path / "run") == lines_of(world.pretrained)
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_a_full_disk_during_prepare_leaves_what_was_prepared_and_says_so(
    world: World, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 * 1024) as disk:
        failed = world.zygote.run(world.prepare(disk / "prepared")).must(2)
        assert "Traceback" not in failed.errors
        assert "No space left" in failed.errors
        left = [path for path in disk.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) < 16 * 1024


def test_a_slow_disk_delays_no_step_and_two_saves_are_never_under_way(
    world: World, tmp_path: Path
) -> None:
    """Each flush of the first save takes long: steps go on beside it."""
    slow = fault("fsync", "sleep:0.7", path=r"checkpoints/\.tmp-step-4", last=0)
    words = world.pretrain(tmp_path / "run", "--save.keep_last", "9")
    most = [0]
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            under_way = list((tmp_path / "run" / "checkpoints").glob(".tmp-step-*"))
            most[0] = max(most[0], len(under_way))
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run = world.zygote.start(words, slow)
        until(lambda: bool(list((tmp_path / "run" / "checkpoints").glob(".tmp-step-4*"))), run)
        until(lambda: len(metrics_of(tmp_path / "run")) >= 7, run)
        assert 4 not in checkpoints_of(tmp_path / "run"), "the save was over before any step"
        run.end().must()
    finally:
        watching.set()
        thread.join()
    assert most[0] == 1
    assert checkpoints_of(tmp_path / "run")[-1] == STEPS
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_the_process_ends_only_when_the_last_save_is_safe(world: World, tmp_path: Path) -> None:
    slow = fault("fsync", "sleep:0.5", path=rf"checkpoints/\.tmp-step-{STEPS}", last=0)
    run = world.zygote.start(world.pretrain(tmp_path / "run"), slow)
    until(lambda: bool(list((tmp_path / "run" / "checkpoints").glob(f".tmp-step-{STEPS}*"))), run)
    run.end().must()
    assert whole_checkpoints(tmp_path / "run")[-1] == STEPS


def test_a_folder_that_cannot_be_written_is_a_line(world: World, tmp_path: Path) -> None:
    """Before anything is trained. Root may write everywhere, so a file stands in the way there."""
    place = tmp_path / "locked"
    place.mkdir()
    if os.geteuid() == 0:
        place.rmdir()
        place.write_text("a file")
    else:
        place.chmod(0o500)
    failed = world.zygote.run(world.pretrain(place / "run")).must(2)
    assert failed.errors.count("\n") <= 2
    assert "Traceback" not in failed.errors


@pytest.mark.parametrize("policy", [CONTINUE, STOP])
def test_metrics_that_cannot_be_written_end_the_run_resumable_where_it_is_asked_for(
    policy: tuple[str, str], world: World, tmp_path: Path
) -> None:
    """Two lines fail; under `continue` they are only late."""
    broken = fault("write", "ENOSPC", path=r"metrics\.jsonl$", nth=8, last=9)
    words = world.pretrain(tmp_path / "run", *policy)
    ended = world.zygote.run(words, broken, *PACED).must(
        0 if policy is CONTINUE else EXIT_INTERRUPTED
    )
    assert "Traceback" not in ended.errors
    assert re.search(r"metrics\.jsonl: cannot be written \(.*: [\d,]+ are free\)", ended.errors)
    if policy is STOP:
        status = json.loads((tmp_path / "run" / "run_status.json").read_bytes())
        assert (status["status"], status["checkpoint"]) == ("resumable", "checkpoints/step-4")
        world.zygote.run([*words, "--resume"]).must()
    assert lines_of(tmp_path / "run") == lines_of(world.pretrained)
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


@pytest.mark.parametrize(
    ("policy", "last", "ends_at"),
    [(CONTINUE, 1, None), (CONTINUE, 0, 4), (STOP, 0, 4)],
)
def test_a_better_model_that_the_disk_has_no_room_for_waits_or_is_made_again(
    policy: tuple[str, str],
    last: int,
    ends_at: int | None,
    world: World,
    tuned: Path,
    tmp_path: Path,
) -> None:
    """No checkpoint speaks of a best model that is not there; said with the bytes it needs."""
    run = tmp_path / "run"
    broken = fault("fsync", "ENOSPC", path=r"\.model\.new-.*/model\.safetensors$", last=last)
    words = world.finetune(run, *policy)
    ended = world.zygote.run(words, broken, *PACED).must(0 if ends_at is None else EXIT_INTERRUPTED)
    assert "Traceback" not in ended.errors
    assert re.search(r"/model: cannot be written \(.*it needs [\d,]+ bytes, [\d,]+", ended.errors)
    if ends_at is not None:
        assert checkpoints_of(run) == whole_checkpoints(run) == [ends_at]
        assert not (run / "model").exists()
        world.zygote.run([*words, "--resume"]).must()
    assert final_hashes(run) == final_hashes(tuned)
    assert lines_of(run) == lines_of(tuned)


@pytest.mark.parametrize(  # a fine-tuned model is written while it trains: the test above
    ("verb", "name"),
    [
        ("pretrain", "model/model.safetensors"),
        ("pretrain", "README.md"),
        ("finetune", "README.md"),
    ],
)
def test_results_that_the_disk_has_no_room_for_are_written_by_a_resume(
    verb: str, name: str, world: World, tuned: Path, tmp_path: Path
) -> None:
    place = rf"\.model\.new-.*/{Path(name).name}$" if "/" in name else rf"\.{name}\.tmp-\d+$"
    words = getattr(world, verb)(tmp_path / "run")
    ended = world.zygote.run(words, fault("fsync", "ENOSPC", path=place, last=0))
    ended.must(EXIT_INTERRUPTED)
    assert "Traceback" not in ended.errors
    assert "which is saved, but its results are not" in ended.errors
    for file, key in (("run_status.json", "resumable"), ("summary.json", "interrupted")):
        assert json.loads((tmp_path / "run" / file).read_bytes())["status"] == key
    world.zygote.run([*words, "--resume"]).must()
    whole = world.pretrained if verb == "pretrain" else tuned
    assert final_hashes(tmp_path / "run") == final_hashes(whole)
    assert lines_of(tmp_path / "run") == lines_of(whole)
