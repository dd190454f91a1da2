"""Adapters on two ranks: the result of one process, dropout included."""

from typing import Any

import pytest
import torch

from bertsmith.model.config import LORA_TARGETS, LoraConfig
from bertsmith.model.lora import attach, freeze_encoder
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import Trained, new_model, packs_of, share_of, weights_of
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
CONFIG = OptimConfig(learning_rate=3e-3)


def train(world: World, name: StrategyName = "ddp") -> Trained:
    model = new_model("classifier")
    attach(model, LoraConfig(rank=4, dropout=0.2, targets=list(LORA_TARGETS)), seed=0)
    freeze_encoder(model, trained=("classifier", "pooler"))
    strategy = wrap(name, model, world, dp_devices=1, dtype=torch.float32)
    optimizer = AdamW(group_parameters(model, CONFIG), CONFIG)
    losses, grad_norms = [], []
    for step in range(10):
        report = train_step(
            strategy,
            share_of(packs_of("classifier", step, (2, 3)[step % 2]), world),
            optimizer,
            compute=FP32,
            scaler=None,
            step=step,
            seed=7,
            learning_rate=CONFIG.learning_rate,
            max_grad_norm=1.0,
        )
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
    return Trained(losses=losses, grad_norms=grad_norms, weights=weights_of(strategy, model))


def test_two_ranks_give_the_result_of_one_process() -> None:
    found: list[Any] = run_ranks(train)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted = train(World(), "none")
    torch.set_num_threads(before)
    start = dict(new_model("classifier").named_parameters())
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(found[0].weights[key], weight, rtol=1e-3, atol=2e-5, msg=key)
        if key in start:
            is_frozen = key.startswith("encoder.")
            assert torch.equal(found[0].weights[key], start[key]) == is_frozen, key
