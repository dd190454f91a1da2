"""Killed at any moment, a run goes on by itself and ends as if nothing had been.

Faults 1, 2 and 9 of the list in `docs/reliability.md`. Three kinds of end: kill -9 at each call
that changes the disk, kill -9 at a random moment, and a power cut, which also takes what had not
been flushed (a kill cannot show that: what a process wrote, the kernel keeps).
"""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from fault_harness.attacks import KILLED, difference, journaled, kill_at, kill_at_random
from fault_harness.journal import Call, read_journal, write_as_after_a_power_cut
from fault_harness.runs import (
    checkpoints_of,
    fault,
    final_hashes,
    is_whole,
    whole_checkpoints,
)
from fault_harness.world import STEPS, TUNING_STEPS, World, abreast


@pytest.fixture(scope="module")
def calls(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every call on the disk of a run that keeps two checkpoints."""
    folder = tmp_path_factory.mktemp("journal")
    journaled(world, folder, world.pretrain(folder / "run"))
    return list(read_journal(folder / "journal"))


def moments_worth_a_kill(calls: Sequence[Call]) -> list[int]:
    """Calls of a start, of one save with its retention, and of an end; from 1.

    The saves are alike, and so are the files of a folder that is flushed or deleted: of these the
    first and the last. `benchmarks/faults.py` kills at every call.
    """
    renamed = [
        number
        for number, call in enumerate(calls)
        if call.name == "rename" and call.paths[1].startswith("checkpoints/step-")
    ]
    second, third, last = renamed[1], renamed[2], renamed[-1]
    kinds = [(call.name, Path(call.paths[0]).parent) for call in calls]
    return [
        number + 1
        for number, kind in enumerate(kinds)
        if (number < 4 or second < number <= third + 4 or number >= last)
        and [kind] * 3 != kinds[number - 1 : number + 2]
    ]


def test_a_kill_at_any_call_on_the_disk_changes_nothing(
    world: World, calls: list[Call], tmp_path: Path
) -> None:
    chosen = moments_worth_a_kill(calls)
    assert len(chosen) > 15
    wrong = [
        f"{said}: {calls[nth - 1].name} {calls[nth - 1].paths}"
        for nth, said in zip(
            chosen,
            abreast([partial(kill_at, world, tmp_path / str(nth), nth) for nth in chosen]),
            strict=True,
        )
        if said
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("size", [1, 2])
def test_random_kills_change_nothing(size: int, world: World, tmp_path: Path) -> None:
    """20 and 100 of them are in `benchmarks/faults.py`."""
    run = tmp_path / "run"
    kills = kill_at_random(world.zygote, world.pretrain(run), run, times=4, size=size)
    assert kills >= 1
    assert difference(run, world.pretrained) is None


def test_fine_tuning_is_killed_at_the_rename_of_a_checkpoint_and_of_a_better_model(
    world: World, tuned: Path, tmp_path: Path
) -> None:
    for name, at in (("checkpoint", r"/step-8$"), ("model", r"/model$")):
        words = world.finetune(tmp_path / name)
        for do in ("kill", "kill_after"):
            dead = world.zygote.run([*words, "--resume"], fault("rename", do, path=at))
            assert dead.code == KILLED, dead.errors
        world.zygote.run([*words, "--resume"]).must()
        assert difference(tmp_path / name, tuned) is None
    assert checkpoints_of(tuned)[-1] == TUNING_STEPS


def test_after_a_power_cut_each_checkpoint_that_has_its_name_is_whole(
    calls: list[Call], tmp_path: Path
) -> None:
    """At every moment of the run, but for what is being deleted; and what is safe stays so."""
    safe, going, cut = 0, set[int](), tmp_path / "cut"
    for call in calls:
        if call.name in ("unlink", "rmdir") and call.paths[0].startswith("checkpoints/step-"):
            going.add(step_of(call.paths[0]))
        write_as_after_a_power_cut(call, cut)
        whole = whole_checkpoints(cut)
        assert set(checkpoints_of(cut)) - set(whole) <= going, f"torn before {call}"
        assert max(whole, default=0) >= safe, f"less than was safe before {call}"
        safe = max(safe, max(durable_checkpoints(call), default=0))
        shutil.rmtree(cut)
    assert safe == STEPS


def step_of(path: str) -> int:
    """Of `checkpoints/step-N/...`."""
    return int(path.split("/")[1].removeprefix("step-"))


def durable_checkpoints(call: Call) -> list[int]:
    """Steps whose rename is safe too, once this call is made: their parent has been flushed."""
    if call.name != "fsync" or call.paths != ["checkpoints"]:
        return []
    return [step_of(path) for path in call.tree if path.startswith("checkpoints/step-")]


def test_every_rename_is_followed_by_a_flush_of_its_folder_before_anything_is_deleted(
    calls: list[Call],
) -> None:
    """Else the old name could be gone from the disk while the new one is not there yet."""
    waiting: set[str] = set()
    for call in calls:
        if call.name == "rename" and call.paths[1].startswith("checkpoints/step-"):
            waiting.add("checkpoints")
        if call.name == "fsync":
            waiting.discard(call.paths[0])
        if call.name in ("unlink", "rmdir") and "step-" in call.paths[0]:
            assert not waiting, f"{call.paths[0]} is deleted before {waiting} is flushed"
    assert not waiting


def test_the_run_goes_on_from_what_a_power_cut_leaves(
    world: World, calls: list[Call], tmp_path: Path
) -> None:
    """Without its lock: half a lock is watched for half a minute (`tests/report`)."""
    renames = [n for n, call in enumerate(calls) if call.paths[-1].startswith("checkpoints/step-")]
    for name, number in (("first", renames[0]), ("third", renames[2] + 2)):
        write_as_after_a_power_cut(calls[number], tmp_path / name)
        (tmp_path / name / "run.lock").unlink(missing_ok=True)
        words = world.pretrain(tmp_path / name)
        world.zygote.run([*words, "--resume"]).must()
        assert final_hashes(tmp_path / name) == final_hashes(world.pretrained)


def test_one_checkpoint_is_always_whole_when_one_is_kept(world: World, tmp_path: Path) -> None:
    """At every call on the disk, those of retention included."""
    words = world.pretrain(tmp_path / "run", "--save.keep_last", "1")
    journaled(world, tmp_path, words)
    newest = 0
    for number, call in enumerate(read_journal(tmp_path / "journal")):
        ours = [path for path in call.tree if path.startswith("checkpoints/step-")]
        steps = [step_of(path) for path in ours if path.endswith("/manifest.json")]
        assert max(steps, default=0) >= newest, f"call {number}: {call.name} {call.paths}"
        newest = max(steps, default=0)
        if call.name in ("unlink", "rmdir") and "/step-" in call.paths[0]:
            assert step_of(call.paths[0]) < newest, "only what is older than what is safe"
    assert newest == STEPS


def test_a_checkpoint_that_cannot_be_deleted_stops_nothing(world: World, tmp_path: Path) -> None:
    words = world.pretrain(tmp_path / "run", "--save.keep_last", "1")
    broken = [fault(name, "EACCES", path="/step-4(/|$)", last=0) for name in ("unlink", "rmdir")]
    world.zygote.run(words, *broken).must()
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert is_whole(tmp_path / "run" / "checkpoints" / f"step-{STEPS}")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def test_the_best_checkpoint_is_kept(world: World, tmp_path: Path) -> None:
    """Evaluations and saves at the same steps: the best one of them stays beside the last."""
    words = world.pretrain(tmp_path / "run", "--save.keep_last", "1", "--eval.every_steps", "4")
    words += ["--optim.learning_rate", "5e-2", "--save.every_steps", "4"]
    world.zygote.run(words).must()
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / f"step-{STEPS}" / "training_state.json").read_bytes()
    )["state"]
    kept = whole_checkpoints(tmp_path / "run")
    assert kept == sorted({state["best_step"], STEPS})
