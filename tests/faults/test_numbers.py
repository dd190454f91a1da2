"""Numbers that go wrong: each policy, agreed by all ranks, and never a checkpoint that holds them.

Faults 26 and 27 of the list in `docs/reliability.md`. The same step is poisoned however often it is
tried, as a bad document would.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fault_harness.runs import checkpoints_of, fault, final_hashes, losses_of, whole_checkpoints
from fault_harness.world import STEPS, World, abreast

BAD_STEP = 11
SPIKED_STEP = 36
"""32 losses are needed to know what is usual."""

POISON = """
import os
from bertsmith.train.step import dropout_seed_of
from bertsmith.model.heads import MaskedLM
real, bad = MaskedLM.forward, dropout_seed_of(0, step={step} - 1)
def forward(self, batch, *, dropout_seed):
    loss = real(self, batch, dropout_seed=dropout_seed)
    if dropout_seed != bad or os.environ.get("RANK", "0") != "{rank}":
        return loss
    nats = loss.nats
    {what}
    return type(loss)(nats=nats, num_targets=loss.num_targets)
MaskedLM.forward = forward
"""
WHAT = {
    "loss NaN": 'nats = nats * float("nan")',
    "loss infinite": 'nats = nats * float("inf")',
    "gradient NaN": 'nats.register_hook(lambda grad: grad * float("nan"))',
    "loss x1000": "nats = nats * 1000.0",
}


def poison(what: str, *, rank: int = 0, step: int = BAD_STEP) -> str:
    """Python that breaks one step on one rank."""
    return POISON.format(step=step, rank=rank, what=WHAT[what])


def check_all_finite(run: Path) -> None:
    """Every tensor of every checkpoint and of the model."""
    files = list(run.rglob("*.safetensors"))
    assert files
    for file in files:
        for name, tensor in load_file(file).items():
            assert bool(torch.isfinite(tensor).all()), f"{file}: {name}"


def state_of(run: Path) -> dict[str, object]:
    """How far the last checkpoint was."""
    last = run / "checkpoints" / f"step-{checkpoints_of(run)[-1]}" / "training_state.json"
    state: dict[str, object] = json.loads(last.read_bytes())["state"]
    return state


@pytest.mark.parametrize(
    ("what", "size"),
    [("loss NaN", 1), ("loss infinite", 1), ("loss NaN", 2), ("gradient NaN", 2)],
)
def test_the_policy_stop_ends_all_ranks_and_names_the_documents(
    what: str, size: int, world: World, tmp_path: Path
) -> None:
    words = world.pretrain(tmp_path / "run", "--guard.non_finite", "stop")
    ranks = world.zygote.start_ranks(words, size=size, before=poison(what, rank=size - 1))
    ends = [rank.end() for rank in ranks]
    assert len({end.code for end in ends}) == 1
    assert ends[0].code not in (0, -9)
    told = "".join(end.errors for end in ends)
    assert "Traceback" not in told
    assert f"step {BAD_STEP}" in told
    assert re.search(r"part-\d\.txt:\d+", told), "no document is named"
    check_all_finite(tmp_path / "run")
    assert max(whole_checkpoints(tmp_path / "run")) < BAD_STEP
    assert json.loads((tmp_path / "run" / "run_status.json").read_bytes())["status"] == "failed"


@pytest.mark.parametrize(
    ("policy", "what"), [("skip", "loss NaN"), ("rollback", "loss NaN"), ("skip", "gradient NaN")]
)
def test_skip_and_rollback_leave_the_step_out_and_go_on(
    policy: str, what: str, world: World, tmp_path: Path
) -> None:
    """One rank and two, poisoned on the last, come to the same weights: all agreed."""
    found = {}
    for size in (1, 2):
        run = tmp_path / f"{size}"
        words = world.pretrain(run, "--guard.non_finite", policy)
        ranks = world.zygote.start_ranks(words, size=size, before=poison(what, rank=size - 1))
        told = "".join(rank.end().must().errors for rank in ranks)
        assert re.search(r"part-\d\.txt:\d+", told), "no document is named"
        check_all_finite(run)
        assert state_of(run)["updates"] == STEPS - 1
        steps = [step for step, _ in losses_of(run)]
        assert steps == [step for step in range(1, STEPS + 1) if step != BAD_STEP]
        found[size] = final_hashes(run)
    assert found[1] == found[2]
    assert found[1] != final_hashes(world.pretrained)


def test_a_skipped_step_is_skipped_again_after_a_kill(world: World, tmp_path: Path) -> None:
    """Step 11 is bad, the run is killed in step 14 and goes on from step 8 or 12."""
    kill = fault("bertsmith.train.step:train_step", "kill", nth=14)
    for name, faults in (("whole", []), ("stopped", [kill])):
        words = world.pretrain(tmp_path / name, "--guard.non_finite", "skip")
        ended = world.zygote.run(words, *faults, before=poison("loss NaN"))
        assert ended.code == (-9 if faults else 0), ended.errors
        world.zygote.run([*words, "--resume"], before=poison("loss NaN")).must()
    assert final_hashes(tmp_path / "stopped") == final_hashes(tmp_path / "whole")


def test_a_loss_spike_is_reported_and_with_rollback_left_out(world: World, tmp_path: Path) -> None:
    """A thousand times the usual; `skip` and `rollback` end where a run without it does."""
    more = ("--steps", "40", "--save.every_steps", "10")
    spiked = poison("loss x1000", step=SPIKED_STEP)

    def run(policy: str) -> None:
        words = world.pretrain(tmp_path / policy, *more, "--guard.spike", policy)
        told = world.zygote.run(words, before=spiked).must().errors
        assert ("spike" in told) == (policy != "off"), told
        if policy != "off":
            assert f"step {SPIKED_STEP}" in told

    def run_without() -> None:
        words = world.pretrain(tmp_path / "without", *more, "--guard.non_finite", "skip")
        world.zygote.run(words, before=poison("loss NaN", step=SPIKED_STEP)).must()

    abreast(
        [partial(run, policy) for policy in ("off", "report", "skip", "rollback")] + [run_without]
    )
    models = {p.name: final_hashes(p)["model"] for p in tmp_path.iterdir()}
    assert models["off"] == models["report"]
    assert models["skip"] == models["rollback"] == models["without"] != models["off"]


def test_no_run_without_a_spike_reports_one(world: World, tmp_path: Path) -> None:
    words = world.pretrain(tmp_path / "run", "--steps", "40", "--guard.spike", "report")
    assert "spike" not in world.zygote.run(words).must().errors
