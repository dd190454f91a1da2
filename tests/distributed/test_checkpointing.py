"""Blocks that are computed again change no result on any strategy: to the bit, dropout on."""

from typing import Any

import pytest
import torch

from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.kernels import build
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import Head, Trained, train_small
from bertsmith.train.precision import Compute
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
BF16 = Compute(device=torch.device("cpu"), dtype=torch.bfloat16)
HEADS: tuple[Head, ...] = ("masked language model", "classifier")
STRATEGIES: tuple[StrategyName, ...] = ("ddp", "fsdp")
NONE: tuple[BlockMode, ...] = ("none", "none")
MODES: tuple[tuple[BlockMode, ...], ...] = (
    ("full", "full"),
    ("selective", "selective"),
    ("none", "full"),
)
PACKS, STEPS = (4, 3, 1, 2), 4
"""Packs of the steps: several passes a rank, and steps that ranks cannot share evenly."""


def trained(
    head: Head, strategy: StrategyName, world: World, modes: tuple[BlockMode, ...]
) -> Trained:
    return train_small(
        head,
        strategy,
        world,
        FP32,
        steps=STEPS,
        packs=PACKS,
        dp_devices=2 if strategy == "dp" else 1,
        checkpointing=modes,
    )


def train_everything(world: World, kernels: bool) -> dict[Any, Trained]:
    """What a rank does."""
    if not kernels:
        build.load = lambda storage: None  # type: ignore[assignment]
    return {
        (head, strategy, modes): trained(head, strategy, world, modes)
        for head in HEADS
        for strategy in STRATEGIES
        for modes in (NONE, *MODES)
    }


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "torch"])
def two_ranks(request: pytest.FixtureRequest) -> list[dict[Any, Trained]]:
    return run_ranks(train_everything, request.param)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("head", HEADS)
def test_two_ranks_train_the_same_weights_to_the_bit(
    head: Head,
    strategy: StrategyName,
    modes: tuple[BlockMode, ...],
    two_ranks: list[dict[Any, Trained]],
) -> None:
    for ranks in two_ranks:
        wanted, found = ranks[head, strategy, NONE], ranks[head, strategy, modes]
        assert found.losses == wanted.losses
        assert found.grad_norms == wanted.grad_norms
        assert found.weights.keys() == wanted.weights.keys()
        for name, weight in wanted.weights.items():
            assert torch.equal(found.weights[name], weight), name


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(build, "load", lambda storage: None)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("strategy", ["none", "dp"])
@pytest.mark.parametrize("head", HEADS)
def test_one_process_and_dp_replicas_train_the_same_weights_to_the_bit(
    head: Head, strategy: StrategyName, modes: tuple[BlockMode, ...], body: None
) -> None:
    wanted = trained(head, strategy, World(), NONE)
    found = trained(head, strategy, World(), modes)
    assert (found.losses, found.grad_norms) == (wanted.losses, wanted.grad_norms)
    assert all(torch.equal(found.weights[k], w) for k, w in wanted.weights.items())
