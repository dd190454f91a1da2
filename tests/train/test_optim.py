"""AdamW equals torch's; groups decay what they should; the norm is that of the whole gradient."""

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model.heads import MaskedLM
from bertsmith.model.kernels import build
from bertsmith.parallel.sharding import fill
from bertsmith.train import optim as optim_module
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from live_tensors import counted

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


def trained_weights(moments: Literal["fp32", "bf16"], *, steps: int) -> tuple[list[Tensor], float]:
    """A regression of 40 outputs on 30 inputs, and its mean loss over the last ten steps."""
    config = OptimConfig(weight_decay=0.01, moments=moments, beta2=0.98)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 40))
    teacher = nn.Linear(30, 40)
    optimizer = AdamW(group_parameters(model, config), config)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 30)
        loss = (model(inputs) - teacher(inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.set_learning_rate(5e-3)
        optimizer.step()
        losses.append(float(loss.detach()))
    return [p.detach().clone() for p in model.parameters()], sum(losses[-10:]) / 10


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_a_hundred_updates_with_bf16_moments_go_where_fp32_ones_do(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 % of the way that the weights have gone, and of the loss; bf16 rounds to 0.8 %."""
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    began, _ = trained_weights("fp32", steps=0)
    wide, wide_loss = trained_weights("fp32", steps=100)
    narrow, narrow_loss = trained_weights("bf16", steps=100)
    assert narrow_loss == pytest.approx(wide_loss, rel=0.02)
    for start, one, other in zip(began, wide, narrow, strict=True):
        assert not torch.equal(one, other)
        assert float((one - other).norm()) < 0.02 * float((one - start).norm())


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_bf16_moments_fade_as_they_should_on_average(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.999 a step is a quarter of bf16's resolution: rounded to nearest, nothing would fade."""
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    config = OptimConfig(moments="bf16", beta1=0.999, beta2=0.999)
    model = nn.Linear(200, 100, bias=False)
    optimizer = AdamW(group_parameters(model, config), config)
    state = optimizer.state[model.weight]
    state["first_moment"].fill_(-1.0)
    state["second_moment"].fill_(1.0)
    for _ in range(200):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    for moment, sign in (("first_moment", -1.0), ("second_moment", 1.0)):
        assert state[moment].dtype == torch.bfloat16
        mean = float(state[moment].float().mean())
        assert mean == pytest.approx(sign * 0.999**200, rel=2e-3)


def test_bf16_moments_are_the_same_from_the_kernel_and_from_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for draws where the last bit of fp32 decides: a unit of bf16, rarely."""
    found = []
    for load in (build.load, lambda storage: None):
        monkeypatch.setattr(build, "load", load)
        torch.manual_seed(1)
        model = nn.Linear(300, 50)
        config = OptimConfig(moments="bf16")
        optimizer = AdamW(group_parameters(model, config), config)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        found.append([m.float() for _, m in optimizer.named_moments()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
        assert float((one != other).float().mean()) < 1e-3


def test_bf16_moments_pass_through_fp32_unchanged_so_that_a_run_resumes_exactly(
    new_run: NewRun,
) -> None:
    """A checkpoint stores fp32; the draws are those of the update's number."""
    config = OptimConfig(moments="bf16")
    runs = []
    for is_resumed in (False, True):
        model, optimizer = new_run(config)
        for number in range(6):
            if number == 3 and is_resumed:
                stored = {n: m.float() for n, m in optimizer.named_moments()}
                weights = model.state_dict()
                model, optimizer = new_run(config)
                model.load_state_dict(weights)
                for name, moment in optimizer.named_moments():
                    fill(moment, stored[name])
                optimizer.updates = 3
            for parameter in model.parameters():
                parameter.grad = torch.cos(parameter.detach() * 50 + number)
            optimizer.set_learning_rate(1e-3)
            optimizer.step()
        runs.append((list(model.parameters()), dict(optimizer.named_moments())))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert all(torch.equal(m, runs[1][1][n]) for n, m in runs[0][1].items())


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_an_update_and_its_norm_are_made_in_place(
    kernels: bool, moments: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 MB of weights the update takes nothing anew; what torch widens, it does in pieces."""
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
        monkeypatch.setattr(optim_module, "ELEMENTS_AT_ONCE", 10_000)
    config = OptimConfig(moments=moments)
    model = nn.Linear(2000, 2000)
    optimizer = AdamW(group_parameters(model, config), config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with counted() as found:
        optimizer.squared_grad_norm()
        optimizer.step()
    assert found.peak_bytes < 1_000_000
