"""The device and format a run computes in."""

import pytest
import torch

from bertsmith.errors import UserError
from bertsmith.train import precision as module
from bertsmith.train.precision import choose_compute


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_cpu_is_bf16_only_where_the_cpu_computes_it(
    has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_computes_bf16", lambda: has_bf16)
    assert choose_compute("auto", "cpu").name == expected


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu_is_bf16_else_fp16(
    has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    chosen = choose_compute("auto", "auto")
    assert (chosen.name, chosen.device.type) == (expected, "cuda")
    if not has_bf16:
        with pytest.raises(UserError, match="does not compute bf16; use fp16 or fp32"):
            choose_compute("bf16", "cuda")


def test_a_gpu_that_is_not_there_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: no GPU"):
        choose_compute("auto", "cuda")


def test_fp32_products_keep_fp32_accuracy() -> None:
    """Rounding the inputs to bf16 would err near 3e-3."""
    choose_compute("fp32", "cpu")
    left, right = torch.randn(33, 700), torch.randn(700, 33)
    exact = left.double() @ right.double()
    error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_are_computed_in_the_chosen_format(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_computes_bf16", lambda: True)
    compute = choose_compute(precision, "cpu")  # type: ignore[arg-type]
    with compute.autocast():
        assert (torch.ones(2, 3) @ torch.ones(3, 2)).dtype == dtype


def test_bf16_is_refused_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_computes_bf16", lambda: False)
    with pytest.raises(UserError, match="this CPU has no bf16 instructions"):
        choose_compute("bf16", "cpu")
