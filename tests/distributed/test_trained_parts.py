"""Rates by part, frozen parts and parts that thaw: two ranks, and dp, give one process's result."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bertsmith.model.parts import part_of, parts_of
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import Head, Trained, new_model, packs_of, share_of, weights_of
from bertsmith.recipes.trained_parts import freeze
from bertsmith.train.config import OptimConfig
from bertsmith.train.layer_rates import plan_parts
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
STEPS = 12
HEADS: tuple[Head, ...] = ("masked language model", "classifier")
CASES = {
    "decay": (OptimConfig(learning_rate=3e-3, layer_decay=0.7), None),
    "frozen": (OptimConfig(learning_rate=3e-3, rates="1=1e-3,head=5e-3"), "embeddings,0"),
    "thawing": (OptimConfig(learning_rate=3e-3, layer_decay=0.7, unfreeze="steps:3"), None),
}


def train(
    head: Head, case: str, name: StrategyName, world: World, *, dp_devices: int = 1
) -> Trained:
    config, frozen = CASES[case]
    model = new_model(head)
    freeze(frozen, model, num_layers=len(model.encoder.blocks))
    plans = plan_parts(config, parts_of(n for n, _ in model.named_parameters()))
    strategy = wrap(name, model, world, dp_devices=dp_devices, dtype=torch.float32)
    optimizer = AdamW(group_parameters(model, config, plans), config)
    losses, grad_norms = [], []
    for step in range(STEPS):
        if optimizer.thaw():
            strategy.trained_changed()
        report = train_step(
            strategy,
            share_of(packs_of(head, step, (2, 3)[step % 2]), world),
            optimizer,
            compute=FP32,
            scaler=None,
            step=step,
            seed=7,
            learning_rate=config.learning_rate,
            max_grad_norm=1.0,
        )
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
    return Trained(losses=losses, grad_norms=grad_norms, weights=weights_of(strategy, model))


def train_everything(world: World) -> dict[Any, Trained]:
    names: tuple[StrategyName, ...] = ("ddp", "fsdp")
    return {
        (head, case, name): train(head, case, name, world)
        for head in HEADS
        for case in CASES
        for name in names
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Trained]]:
    return run_ranks(train_everything)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[Any, Trained]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {(head, case): train(head, case, "none", World()) for head in HEADS for case in CASES}
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "dp"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head", HEADS)
def test_several_devices_give_one_result(
    head: Head,
    case: str,
    name: StrategyName,
    two_ranks: list[dict[Any, Trained]],
    alone: dict[Any, Trained],
) -> None:
    wanted = alone[head, case]
    found = (
        train(head, case, "dp", World(), dp_devices=2)
        if name == "dp"
        else two_ranks[0][head, case, name]
    )
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    start = dict(new_model(head).named_parameters())
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[key], weight, rtol=1e-3, atol=2e-5)
        is_frozen = case == "frozen" and part_of(key) in ("embeddings", "0")
        assert torch.equal(found.weights[key], start[key]) == is_frozen, key
