"""AdamW equals torch's; groups decay what they should; the norm is that of the whole gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bertsmith.model.heads import MaskedLM
from bertsmith.model.kernels import build
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]


def test_each_parameter_is_in_one_group_and_only_matrices_decay(new_run: NewRun) -> None:
    model, _ = new_run(OptimConfig())
    groups = group_parameters(model, OptimConfig(weight_decay=0.1))
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        for name, parameter in group.parameters.items():
            is_matrix = parameter.ndim == 2
            assert (group.weight_decay == 0.1) == is_matrix, name


def test_embeddings_can_be_spared_from_decay(new_run: NewRun) -> None:
    model, _ = new_run(OptimConfig())
    decayed = group_parameters(model, OptimConfig(decay_embeddings=False))[0].parameters
    assert not [name for name in decayed if name.startswith("encoder.embeddings")]
    assert "encoder.blocks.0.qkv.weight" in decayed


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_twenty_clipped_updates_equal_torch(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    torch.manual_seed(0)
    ours, theirs = nn.Linear(7, 5), nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    optimizer = AdamW(group_parameters(ours, config), config)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.1},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for step in range(20):
        rate = 1e-2 * (step + 1) / 20
        inputs = torch.randn(3, 7)
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
        assert math.sqrt(optimizer.squared_grad_norm()) == pytest.approx(norm, rel=1e-6)
        optimizer.set_learning_rate(rate)
        optimizer.clip_factor = min(0.5 / (norm + 1e-6), 1.0)
        optimizer.step()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7)


def test_the_norm_adds_every_tensor_in_float64(new_run: NewRun) -> None:
    model, optimizer = new_run(OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    count = sum(p.numel() for p in model.parameters())
    assert math.sqrt(optimizer.squared_grad_norm()) == pytest.approx(
        3.0 * math.sqrt(count), rel=1e-14
    )
