"""One rank that runs out of memory makes all of them take smaller passes, and changes no result."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from bertsmith.batch import StepShare
from bertsmith.checkpoint.state import RunState
from bertsmith.parallel import gradient_sum
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import OPTIM, new_model, packs_of, share_of
from bertsmith.train.config import GuardConfig
from bertsmith.train.interruption import Interruption
from bertsmith.train.loop import Budget, Cadence, LoopConfig, train
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import StepReport
from quiet_hooks import QuietHooks
from ranks import run_ranks

FITS_TOKENS = 70
"""Sequences have at most 63 tokens, packs up to 8 of them."""


class Losses(QuietHooks):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.smaller: list[tuple[int, int]] = []

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        self.losses.append(report.loss)

    def on_out_of_memory(self, step: int, max_tokens: int) -> None:
        self.smaller.append((step, max_tokens))


BUCKET_BYTES = 1 << 12
"""So that the small model has many buckets."""

Way = Literal["forward", "backward"]


def train_with(
    world: World, packs: int, poor_rank: int | None, start: int | None, way: Way = "forward"
) -> tuple[list[float], list[tuple[int, int]]]:
    """Six steps; a pass of many tokens does not fit on the poor rank from step 3 on.

    In the backward, it fails half-way: other buckets are on their way to the other rank already.
    """
    hooks = Losses()
    model = new_model("masked language model")
    gradient_sum.BUCKET_BYTES = BUCKET_BYTES
    strategy = wrap("ddp", model, world, dp_devices=1, dtype=torch.float32)
    is_large = False

    def fail() -> None:
        if is_large and len(hooks.losses) >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def begin(module: object, inputs: tuple[Any, ...]) -> None:
        nonlocal is_large
        is_large = inputs[0].num_tokens > FITS_TOKENS
        if way == "forward":
            fail()

    if world.rank == poor_rank:
        model.register_forward_pre_hook(begin)
        if way == "backward":
            middle = list(model.parameters())[len(list(model.parameters())) // 2]
            middle.register_hook(lambda gradient: fail())  # type: ignore[no-untyped-call]

    def steps(first: int) -> Iterator[StepShare[Any]]:
        for step in range(first, 100):
            yield share_of(packs_of("masked language model", step, packs), world)

    train(
        strategy,
        AdamW(group_parameters(model, OPTIM), OPTIM),
        steps=steps,
        config=LoopConfig(
            budget=Budget(steps=6),
            optim=OPTIM,
            guard=GuardConfig(),
            seed=7,
            largest_pass_tokens=504,
            smallest_pass_tokens=63,
            evaluate=Cadence(),
            save=Cadence(),
        ),
        compute=Compute(device=torch.device("cpu"), dtype=torch.float32),
        state=RunState(micro_batch_tokens=start),
        hooks=hooks,
        interruption=Interruption(),
    )
    return hooks.losses, hooks.smaller


def all_ways(world: World) -> dict[Any, Any]:
    """A pack a rank, so that the pass that fails is the one in which gradients meet; and three."""
    found: dict[Any, Any] = {}
    for packs in (2, 6):
        for poor_rank in (None, 0, 1):
            found[packs, poor_rank, "forward"] = train_with(world, packs, poor_rank, None)
        found[packs, "small"] = train_with(world, packs, None, 63)
        for rank in (0, 1):
            found[packs, rank, "backward"] = train_with(world, packs, rank, None, "backward")
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(all_ways)


@pytest.mark.parametrize("packs", [2, 6])
@pytest.mark.parametrize("poor_rank", [0, 1])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_all_ranks_halve_together_and_the_losses_stay(
    two_ranks: list[dict[Any, Any]], packs: int, poor_rank: int, way: Way
) -> None:
    for rank in two_ranks:
        losses, smaller = rank[packs, poor_rank, way]
        assert smaller == [(3, 252), (3, 126), (3, 63)]
        assert losses == pytest.approx(rank[packs, None, "forward"][0], rel=1e-6)
        assert losses == pytest.approx(rank[packs, "small"][0], rel=1e-6)
    assert two_ranks[0] == two_ranks[1]
