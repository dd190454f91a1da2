"""Attention over packed sequences: one function, four bodies, each token sees its own sequence.

Bodies: `kernels` (C, CPU), `varlen` (CUDA, no dropout), `grouped` (any device: SDPA over runs of
equal length) and `reference` (the whole grid under a block mask; what the others are tested by).
With dropout all bodies keep the same elements: see `dropout.keep_of`, rows t * H + h, columns the
key's place within its sequence.

Shape legend: T packed tokens, D width, N sequences, H heads, K head width, B sequences of one
length, S that length.
"""

import ctypes
import importlib.util
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.model.config import EncoderConfig
from bertsmith.model.dropout import Dropout, keep_of
from bertsmith.model.kernels import build, calls

Body = Literal["kernels", "varlen", "grouped", "reference"]


def attention(
    qkv_TD: Tensor,
    starts_N1: Tensor,
    *,
    longest: int,
    heads: int,
    drop: Dropout,
    body: Body | None = None,
) -> Tensor:
    """dropout(softmax(QK' / sqrt(K))) V within each sequence, shape (T, D).

    Args:
        qkv_TD: Queries, keys and values side by side, each all heads: (T, 3 * H * K).
        starts_N1: Where each sequence starts, then T, int32.
        longest: Tokens in the longest sequence.
        heads: Number of heads, H.
        drop: Dropout of the probabilities.
        body: Which implementation; None chooses by `body_for`.
    """
    match body or body_for(qkv_TD, heads=heads, drop=drop):
        case "kernels":
            context_TD: Tensor = _KernelAttention.apply(  # type: ignore[no-untyped-call]
                qkv_TD, starts_N1, longest, heads, drop
            )
            return context_TD
        case "varlen":
            return _varlen_attention(qkv_TD, starts_N1, longest=longest, heads=heads)
        case "grouped":
            return _grouped_attention(qkv_TD, starts_N1, heads=heads, drop=drop)
        case "reference":
            return reference_attention(qkv_TD, starts_N1, heads=heads, drop=drop)


def body_for(qkv_TD: Tensor, *, heads: int, drop: Dropout) -> Body:
    """The fastest body that computes exactly this, dropout included."""
    if library_for(qkv_TD) is not None:
        return "kernels"
    head_width = qkv_TD.shape[1] // 3 // heads
    if drop.threshold == 0 and has_varlen(qkv_TD.device, qkv_TD.dtype, head_width=head_width):
        return "varlen"
    return "grouped"


def has_varlen(device: torch.device, dtype: torch.dtype, *, head_width: int) -> bool:
    """Whether torch's variable-length kernel can be used; it has no dropout.

    It is FlashAttention: half precision, Ampere or newer, heads of at most 256 in steps of 8.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_width % 8 == 0
        and head_width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
    )


def describe_attention(config: EncoderConfig, *, device: torch.device, dtype: torch.dtype) -> str:
    """One line for the log: which body attends, and that it does the dropout the config asks."""
    if device.type == "cpu":
        return build.status()
    drop_prob = config.attention_probs_dropout_prob
    head_width = config.hidden_size // config.num_attention_heads
    can = has_varlen(device, dtype, head_width=head_width)
    if can and drop_prob == 0.0:
        return "attention: torch's variable-length kernel"
    why = "it has no dropout" if can else "it is not available here"
    return (
        f"attention: groups of equal length, since torch's variable-length kernel is not used "
        f"({why}); attention_probs_dropout_prob {drop_prob} is applied as configured"
    )


def library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The C kernels for a tensor's type, if it is one they know and they could be compiled."""
    if tensor.device.type != "cpu":
        return None
    return build.load_for(tensor.dtype)


class _KernelAttention(torch.autograd.Function):
    """The C kernels; scores never reach memory, forward or backward."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TD: Tensor, starts_N1: Tensor, longest: int, heads: int, drop: Dropout
    ) -> Tensor:
        lib = library_for(qkv_TD)
        assert lib is not None, "chosen by body_for"
        groups = calls.AttentionGroups(
            starts_N1=starts_N1,
            query_starts_N1=starts_N1,
            rows_M=None,
            longest=longest,
            heads=heads,
        )
        qkv_TD = qkv_TD.contiguous()
        context_TD, log_sums_TH = calls.attention_forward(
            lib, *query_and_rest(qkv_TD), groups, drop
        )
        ctx.save_for_backward(qkv_TD, context_TD, log_sums_TH)
        ctx.lib, ctx.groups, ctx.drop = lib, groups, drop
        return context_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_context_TD: Tensor) -> tuple[Tensor, None, None, None, None]:
        qkv_TD, context_TD, log_sums_TH = ctx.saved_tensors
        d_qkv_TD = torch.empty_like(qkv_TD)
        calls.attention_backward(
            ctx.lib,
            *query_and_rest(qkv_TD),
            ctx.groups,
            (context_TD, log_sums_TH),
            d_context_TD.contiguous(),
            ctx.drop,
            into=query_and_rest(d_qkv_TD),
        )
        return d_qkv_TD, None, None, None, None


def query_and_rest(qkv_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the queries, and of the keys and values."""
    width = qkv_TD.shape[1] // 3
    return qkv_TD[:, :width], qkv_TD[:, width:]


def _varlen_attention(qkv_TD: Tensor, starts_N1: Tensor, *, longest: int, heads: int) -> Tensor:
    """torch.nn.attention.varlen: CUDA, half precision."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - CUDA builds only

    query_THK, key_THK, value_THK = qkv_TD.view(len(qkv_TD), 3, heads, -1).unbind(1)
    output_THK = varlen_attn(query_THK, key_THK, value_THK, starts_N1, starts_N1, longest, longest)
    assert isinstance(output_THK, Tensor), "log-sums were not asked for"
    return output_THK.flatten(1)


def _grouped_attention(qkv_TD: Tensor, starts_N1: Tensor, *, heads: int, drop: Dropout) -> Tensor:
    """Runs of neighbours of equal length, one dense batch each; packs are sorted by length."""
    outputs: list[Tensor] = []
    starts = starts_N1.tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    first = 0
    while first < len(lengths):
        last = first
        while last < len(lengths) and lengths[last] == lengths[first]:
            last += 1
        start, size, count = starts[first], lengths[first], last - first
        qkv_3BHSK = (
            qkv_TD[start : start + count * size]
            .view(count, size, 3, heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        output_BHSK = _dense_attention(qkv_3BHSK, first_token=start, drop=drop)
        outputs.append(output_BHSK.transpose(1, 2).reshape(count * size, -1))
        first = last
    return torch.cat(outputs)


def _dense_attention(qkv_3BHSK: Tensor, *, first_token: int, drop: Dropout) -> Tensor:
    query_BHSK, key_BHSK, value_BHSK = qkv_3BHSK.unbind(0)
    if drop.threshold == 0:
        return F.scaled_dot_product_attention(query_BHSK, key_BHSK, value_BHSK)
    batch, heads, size, width = query_BHSK.shape
    scores_BHSS = query_BHSK @ key_BHSK.transpose(2, 3) * width**-0.5
    probs_BHSS = scores_BHSS.float().softmax(-1)
    places = torch.arange(size, device=scores_BHSS.device)
    tokens_BS = torch.arange(batch, device=places.device)[:, None] * size + places + first_token
    head_H = torch.arange(heads, device=places.device)
    rows_BHS1 = (tokens_BS[:, None, :] * heads + head_H[:, None])[..., None]
    probs_BHSS = probs_BHSS * keep_of(drop, rows_BHS1, places) * drop.scale
    output_BHSK: Tensor = probs_BHSS.to(value_BHSK.dtype) @ value_BHSK
    return output_BHSK


def reference_attention(qkv_TD: Tensor, starts_N1: Tensor, *, heads: int, drop: Dropout) -> Tensor:
    """The whole T x T grid under a block mask: slow, and what the other bodies are tested by."""
    starts = starts_N1.to(torch.int64)
    token_T = torch.arange(len(qkv_TD), device=qkv_TD.device)
    sequence_T = torch.repeat_interleave(token_T[: len(starts) - 1], starts.diff())
    same_TT = sequence_T[:, None] == sequence_T[None, :]
    query_HTK, key_HTK, value_HTK = (
        x.transpose(0, 1) for x in qkv_TD.view(len(qkv_TD), 3, heads, -1).unbind(1)
    )
    scores_HTT = query_HTK @ key_HTK.transpose(1, 2) * query_HTK.shape[-1] ** -0.5
    probs_HTT = scores_HTT.float().masked_fill(~same_TT, -torch.inf).softmax(-1)
    if drop.threshold:
        head_H = torch.arange(heads, device=qkv_TD.device)
        rows_HT1 = (token_T * heads + head_H[:, None])[..., None]
        place_T = token_T - starts[:-1][sequence_T]
        # A key of another sequence has a meaningless place, and probability 0 whatever it is.
        probs_HTT = probs_HTT * keep_of(drop, rows_HT1, place_T) * drop.scale
    output_HTK: Tensor = probs_HTT.to(value_HTK.dtype) @ value_HTK
    return output_HTK.transpose(0, 1).flatten(1)
