"""A checkpoint that is not what was written is noticed before use, and the one before is taken.

Faults 3 to 5 of the list in `docs/reliability.md`. Many damaged checkpoints lie in one run folder,
each newer than the good one: the run has to pass them all over, and to say so of each.
"""

import shutil
from pathlib import Path

import pytest

from bertsmith.errors import EXIT_USER_ERROR
from fault_harness.attacks import (
    Damage,
    add_checkpoint,
    check_all_are_passed_over,
    cut,
    cuts_and_losses,
    final_hashes_are_kept,
    flip,
    remove,
)
from fault_harness.runs import (
    MANIFEST,
    checkpoints_of,
    fault,
    final_hashes,
    is_whole,
    lines_of,
)
from fault_harness.world import STEPS, World

FLIPS = 150


@pytest.fixture
def run(world: World, tmp_path: Path) -> Path:
    """The run that was never stopped, to be damaged: checkpoints 12 and 16."""
    shutil.copytree(world.pretrained, tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_that_was_only_copied_is_taken(world: World, run: Path) -> None:
    """Else the tests below would show nothing: they damage such copies."""
    add_checkpoint(run, STEPS + 1)
    done = world.zygote.run([*world.pretrain(run), "--resume"]).must()
    assert f"resumed from {run}/checkpoints/step-{STEPS + 1}" in done.errors


def test_150_flipped_bits_over_all_files_are_150_checkpoints_passed_over(
    world: World, run: Path
) -> None:
    check_all_are_passed_over(world, run, [flip(seed) for seed in range(FLIPS)])


def test_torn_and_missing_files_are_passed_over_by_name(world: World, run: Path) -> None:
    """Each file cut to nothing, to half and by a byte; each file missing."""
    damages = cuts_and_losses(run)
    lines = check_all_are_passed_over(world, run, damages)
    for (what, _), line in zip(damages, lines, strict=True):
        assert what.split()[0] in line, f"{what}: {line}"


@pytest.mark.parametrize(
    "damage",
    [
        flip(1)[1],
        cut("model.safetensors", 0.5, 0)[1],
        remove("training_state.safetensors")[1],
        remove(MANIFEST)[1],
    ],
)
def test_a_run_goes_back_to_the_one_before_and_ends_the_same(
    damage: Damage, world: World, run: Path
) -> None:
    """What is damaged is set aside under another name, not deleted: somebody may want to look."""
    before = checkpoints_of(run)[-2]
    damage(run / "checkpoints" / f"step-{STEPS}")
    done = world.zygote.run([*world.pretrain(run), "--resume"]).must()
    assert f"resumed from {run}/checkpoints/step-{before}\n" in done.errors
    assert final_hashes(run) == final_hashes(world.pretrained)
    assert lines_of(run) == lines_of(world.pretrained)
    aside = list((run / "checkpoints").glob(f"damaged-step-{STEPS}*"))
    assert len(aside) == 1
    assert not is_whole(aside[0])


def test_with_no_whole_checkpoint_the_run_starts_anew(world: World, run: Path) -> None:
    for step in checkpoints_of(run):
        (run / "checkpoints" / f"step-{step}" / "model.safetensors").write_bytes(b"")
    done = world.zygote.run([*world.pretrain(run), "--resume"]).must()
    assert "starting anew" in done.errors
    assert final_hashes(run) == final_hashes(world.pretrained)
    assert lines_of(run) == lines_of(world.pretrained)


@pytest.mark.parametrize("number", ["EIO", "EMFILE"])
def test_what_cannot_be_read_ends_the_run_with_a_line_and_changes_nothing(
    number: str, world: World, run: Path
) -> None:
    """It may be whole: to set it aside, or to start anew, would lose what somebody trained."""
    held, lines = checkpoints_of(run), lines_of(run)
    words = [*world.pretrain(run), "--resume"]
    broken = fault("read", number, path=r"step-\d+/model\.safetensors$", last=0)
    refused = world.zygote.run(words, broken).must(EXIT_USER_ERROR)
    (told,) = [line for line in refused.errors.splitlines() if "error:" in line]
    assert f"step-{STEPS}/model.safetensors: cannot be read" in told
    assert checkpoints_of(run) == held
    assert not list((run / "checkpoints").glob("damaged-*"))
    assert lines_of(run) == lines
    world.zygote.run(words).must()
    assert final_hashes_are_kept(world, run)
