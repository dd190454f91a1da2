"""Every body of attention equals the block-masked reference, forward and backward."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bertsmith.model.attention import (
    Body,
    attention,
    body_for,
    describe_attention,
    has_varlen,
    reference_attention,
)
from bertsmith.model.config import EncoderConfig
from bertsmith.model.dropout import NO_DROPOUT, Dropout, dropout_at
from bertsmith.model.kernels import build

HEADS, HEAD_WIDTH = 3, 8
LENGTHS = (70, 33, 33, 17, 16, 16, 16, 5, 1, 1)
"""Longest first, as packs are; over and under the kernels' tiles of 16, and of equal length."""

FP32_BOUND = 2e-6
BF16_BOUND = 2e-2
"""Length of the difference as a share of the tensor's."""

needs_kernels = pytest.mark.skipif(
    build.load("fp32") is None, reason="no C compiler, so there are no kernels to test"
)


def inputs(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    width: int = HEAD_WIDTH,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the starts; and what the output's gradient is."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    qkv_TD = torch.randn(total, 3 * HEADS * width, generator=generator).to(dtype)
    weight_TD = torch.randn(total, HEADS * width, generator=generator).to(dtype)
    starts_N1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return qkv_TD, starts_N1, weight_TD


def run(
    body: Body, drop: Dropout, lengths: tuple[int, ...], *, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of queries, keys and values."""
    qkv_TD, starts_N1, weight_TD = inputs(lengths, width=width, dtype=dtype)
    qkv_TD.requires_grad_()
    output_TD = attention(
        qkv_TD, starts_N1, longest=max(lengths), heads=HEADS, drop=drop, body=body
    )
    (output_TD * weight_TD).sum().backward()  # type: ignore[no-untyped-call]
    assert qkv_TD.grad is not None
    return output_TD.detach(), qkv_TD.grad


def distance(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


@needs_kernels
@pytest.mark.parametrize("drop_prob", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("width", [8, 20, 64])
@pytest.mark.parametrize("body", ["kernels", "grouped"])
def test_a_body_equals_the_reference_in_fp32(body: Body, width: int, drop_prob: float) -> None:
    drop = dropout_at(drop_prob=drop_prob, seed=7, site=3)
    actual = run(body, drop, LENGTHS, width=width, dtype=torch.float32)
    expected = run("reference", drop, LENGTHS, width=width, dtype=torch.float32)
    for ours, reference in zip(actual, expected, strict=True):
        assert distance(ours, reference) < FP32_BOUND


@needs_kernels
@pytest.mark.parametrize("drop_prob", [0.0, 0.1])
@pytest.mark.parametrize("body", ["kernels", "grouped"])
def test_a_body_in_bf16_stays_within_its_rounding_of_the_fp32_reference(
    body: Body, drop_prob: float
) -> None:
    drop = dropout_at(drop_prob=drop_prob, seed=7, site=3)
    actual = run(body, drop, LENGTHS, width=64, dtype=torch.bfloat16)
    expected = run("reference", drop, LENGTHS, width=64, dtype=torch.float32)
    for ours, reference in zip(actual, expected, strict=True):
        assert distance(ours, reference) < BF16_BOUND


@needs_kernels
@pytest.mark.parametrize("lengths", [(1,), (16,), (512,), (15, 2), (1, 1, 1)])
def test_packs_of_any_form_agree(lengths: tuple[int, ...]) -> None:
    drop = dropout_at(drop_prob=0.1, seed=1, site=0)
    expected = run("reference", drop, lengths, width=16, dtype=torch.float32)
    for body in ("kernels", "grouped"):
        actual = run(body, drop, lengths, width=16, dtype=torch.float32)
        assert distance(actual[0], expected[0]) < FP32_BOUND
        # A single key has probability 1 whatever the scores: the gradient of q and k is 0 but
        # for rounding, so compare with the scale of the whole.
        scale = float(expected[1].norm())
        assert float((actual[1] - expected[1]).norm()) < FP32_BOUND * scale


def test_the_reference_is_a_softmax_within_each_sequence() -> None:
    qkv_TD, starts_N1, _ = inputs((3, 2))
    output_TD = reference_attention(qkv_TD, starts_N1, heads=HEADS, drop=NO_DROPOUT)
    q, k, v = (x.double() for x in qkv_TD.view(5, 3, HEADS, HEAD_WIDTH).unbind(1))
    for first, last in ((0, 3), (3, 5)):
        for head in range(HEADS):
            scores = q[first:last, head] @ k[first:last, head].T / HEAD_WIDTH**0.5
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            expected = weights @ v[first:last, head]
            columns = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
            torch.testing.assert_close(
                output_TD[first:last, columns].double(), expected, rtol=1e-5, atol=1e-6
            )


def test_large_scores_do_not_overflow() -> None:
    qkv_TD, starts_N1, _ = inputs()
    for body in ("reference", "grouped", None):
        output_TD = attention(
            qkv_TD * 200, starts_N1, longest=max(LENGTHS), heads=HEADS, drop=NO_DROPOUT, body=body
        )
        assert bool(torch.isfinite(output_TD).all())


def test_the_log_says_that_dropout_is_done_or_why_the_fast_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu, shape = torch.device("cuda"), EncoderConfig()
    line = describe_attention(shape, device=gpu, dtype=torch.bfloat16)
    assert "attention_probs_dropout_prob 0.1 is applied" in line
    assert "it has no dropout" in line
    without = replace(shape, attention_probs_dropout_prob=0.0)
    assert "variable-length" in describe_attention(without, device=gpu, dtype=torch.bfloat16)
    narrow = replace(without, hidden_size=60, num_attention_heads=5)
    assert "not available" in describe_attention(narrow, device=gpu, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "head_width", "dtype", "expected"),
    [
        ((9, 0), 64, torch.bfloat16, True),
        ((8, 0), 256, torch.float16, True),
        ((7, 5), 64, torch.float16, False),
        ((9, 0), 12, torch.bfloat16, False),
        ((9, 0), 264, torch.bfloat16, False),
        ((9, 0), 64, torch.float32, False),
    ],
)
def test_the_variable_length_kernel_is_used_only_where_it_runs(
    capability: tuple[int, int],
    head_width: int,
    dtype: torch.dtype,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_varlen(torch.device("cuda"), dtype, head_width=head_width) is expected
    assert not has_varlen(torch.device("cpu"), dtype, head_width=head_width)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drop_prob", [0.0, 0.1])
def test_the_body_chosen_on_a_gpu_equals_the_reference_on_the_cpu(drop_prob: float) -> None:
    drop = dropout_at(drop_prob=drop_prob, seed=7, site=3)
    expected = run("reference", drop, LENGTHS, width=64, dtype=torch.float32)
    qkv_TD, starts_N1, weight_TD = (
        t.cuda() for t in inputs(LENGTHS, width=64, dtype=torch.bfloat16)
    )
    qkv_TD.requires_grad_()
    output_TD = attention(qkv_TD, starts_N1, longest=max(LENGTHS), heads=HEADS, drop=drop)
    (output_TD * weight_TD).sum().backward()  # type: ignore[no-untyped-call]
    assert qkv_TD.grad is not None
    for ours, reference in zip((output_TD.detach(), qkv_TD.grad), expected, strict=True):
        assert distance(ours.cpu(), reference) < BF16_BOUND


def test_without_kernels_the_grouped_body_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load", lambda storage: None)
    qkv_TD, *_ = inputs()
    assert body_for(qkv_TD, heads=HEADS, drop=NO_DROPOUT) == "grouped"
    assert body_for(qkv_TD.half(), heads=HEADS, drop=NO_DROPOUT) == "grouped"
