"""The measured rate of matrix products."""

import pytest
import torch
from torch import Tensor

from bertsmith.model.config import EncoderConfig
from bertsmith.report import gemm
from bertsmith.train.precision import Compute


def test_the_rate_counts_every_product_of_a_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four weights, three products each (forward, for the input, for the weight), a second each."""
    shapes: list[tuple[int, int, int]] = []

    def a_second(left: Tensor, right: Tensor, output: Tensor, *, seconds: float) -> float:
        assert output.shape == (left.shape[0], right.shape[1])
        shapes.append((left.shape[0], left.shape[1], right.shape[1]))
        return 1.0

    monkeypatch.setattr(gemm, "_fastest", a_second)
    shape = EncoderConfig(hidden_size=8, intermediate_size=20, num_attention_heads=2)
    compute = Compute(device=torch.device("cpu"), dtype=torch.float32)
    rate = gemm.gemm_flop_per_second(shape, tokens=5, compute=compute)
    weights = 8 * 24 + 8 * 8 + 8 * 20 + 20 * 8
    assert rate == pytest.approx(3 * 2 * 5 * weights / 12)
    assert sum(2 * m * k * n for m, k, n in shapes) == 3 * 2 * 5 * weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_is_measured_in_the_format_of_training(dtype: torch.dtype) -> None:
    shape = EncoderConfig(hidden_size=8, intermediate_size=20, num_attention_heads=2)
    compute = Compute(device=torch.device("cpu"), dtype=dtype)
    assert gemm.gemm_flop_per_second(shape, tokens=5, compute=compute, seconds=0.01) > 0.0
