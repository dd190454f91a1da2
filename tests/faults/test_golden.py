"""Checkpoints of earlier schemas go on to the right end, or are refused clearly.

Fault 14 of the list in `docs/reliability.md`. `golden/schema-N` holds what a bertsmith of that
schema wrote (`golden/make.py`) with the data to go on; it is never made anew.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.checkpoint.manifest import SCHEMA_VERSION
from bertsmith.errors import EXIT_USER_ERROR
from fault_harness.attacks import OWN_DIGEST
from fault_harness.runs import MANIFEST, is_whole, losses_of
from fault_harness.world import World

GOLDEN = Path(__file__).with_name("golden")
GO_ON = ["pretrain", "--config", "run/run.yaml", "--resume"]
SAVED_AT, STEPS = 8, 12


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the newest one."""
    shutil.copytree(GOLDEN / f"schema-{SCHEMA_VERSION}", tmp_path / "golden")
    return tmp_path / "golden"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("schema-*")))
def test_a_golden_checkpoint_goes_on_to_where_a_fresh_run_ends(
    name: str, world: World, tmp_path: Path
) -> None:
    """A fresh run, not a stored number: another machine rounds another way."""
    shutil.copytree(GOLDEN / name, tmp_path / name)
    run = tmp_path / name / "run"
    done = world.zygote.run(GO_ON, cwd=tmp_path / name).must()
    assert f"resumed from run/checkpoints/step-{SAVED_AT}" in done.errors
    fresh = ["pretrain", "--config", "run/run.yaml", "--output", "fresh"]
    world.zygote.run(fresh, cwd=tmp_path / name).must()
    steps, losses = zip(*losses_of(run), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    for (_, fresh_loss), loss in zip(losses_of(tmp_path / name / "fresh"), losses, strict=True):
        assert math.isclose(fresh_loss, loss, rel_tol=1e-4)
    mine, theirs = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (run, tmp_path / name / "fresh")
    )
    for key, tensor in theirs.items():
        torch.testing.assert_close(mine[key], tensor, rtol=1e-3, atol=1e-4)


def test_the_schema_that_is_written_now_has_a_golden_checkpoint() -> None:
    newest = GOLDEN / f"schema-{SCHEMA_VERSION}" / "run" / "checkpoints" / f"step-{SAVED_AT}"
    assert is_whole(newest), "run golden/make.py: once for each schema"


@pytest.mark.parametrize(("version", "word"), [(999, "newer"), (1, "older")])
def test_a_schema_that_is_not_known_is_refused_and_left_as_it_is(
    version: int, word: str, world: World, golden: Path
) -> None:
    """Refused, not passed over: going back without a word would lose what somebody trained."""
    checkpoint = golden / "run" / "checkpoints" / f"step-{SAVED_AT}"
    manifest = json.loads((checkpoint / MANIFEST).read_bytes()) | {"schema_version": version}
    del manifest[OWN_DIGEST]
    if version > 1:  # the first schema had none
        text = json.dumps(manifest, indent=2) + "\n"
        manifest[OWN_DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    refused = world.zygote.run(GO_ON, cwd=golden).must(EXIT_USER_ERROR)
    assert word in refused.errors
    assert f"schema {version}" in refused.errors
    assert "Traceback" not in refused.errors
    assert is_whole(checkpoint)
