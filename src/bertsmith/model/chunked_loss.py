"""Cross-entropy over a wide vocabulary a few rows at a time: all logits never exist at once.

A chunk's logits become their own gradient and are spent on the gradients of hidden states and table
before the next chunk is made, in the forward pass already, so nothing is computed twice (as Liger
Kernel does it, Hsu et al. 2024). Not in fp16: there the gradient has to be multiplied by the loss
scale before it is rounded, and that arrives with the backward pass, which makes the logits again.

Shape legend: M masked positions, R rows of one chunk, D width, V vocabulary.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.model.config import logits_rows
from bertsmith.model.fused import compute_dtype, fused_library
from bertsmith.model.kernels import calls

_Grads = tuple[Tensor | None, ...]

NO_TARGET = -1
"""In place of a column: the row has no loss and no gradient. loss.c takes any below 0 so."""


def chunked_loss(hidden_MD: Tensor, table_VD: Tensor, bias_V: Tensor, targets_M: Tensor) -> Tensor:
    """Summed cross-entropy of hidden @ table' + bias, a scalar, in nats.

    Products have the compute type; what is summed over the vocabulary or over chunks is fp32.

    Args:
        hidden_MD: Hidden states, any number of rows.
        table_VD: The decoder's weight.
        bias_V: Its bias.
        targets_M: The right columns, int64, or NO_TARGET.
    """
    decoder = _Decoder(
        targets_M=targets_M,
        rows=logits_rows(table_VD.shape[0]),
        lib=fused_library(table_VD),
        dtype=compute_dtype(table_VD),
        makes_gradients=torch.is_grad_enabled(),
    )
    nats: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_MD.to(decoder.dtype), table_VD, bias_V, decoder
    )
    return nats


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decoder:
    """What a pass over the chunks needs besides tensors with gradients."""

    targets_M: Tensor
    rows: int
    lib: ctypes.CDLL | None
    dtype: torch.dtype
    makes_gradients: bool

    @property
    def is_early(self) -> bool:
        """Whether gradients are made in the forward pass."""
        return self.makes_gradients and self.dtype != torch.float16


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, table_VD: Tensor, bias_V: Tensor, decoder: _Decoder
    ) -> Tensor:
        ctx.decoder = decoder
        inputs = (hidden_MD, table_VD, bias_V)
        if decoder.is_early:
            sums = _Sums(*ctx.needs_input_grad[:3])
            nats = _through(decoder, *inputs, into=sums, scale=None)
            ctx.save_for_backward(sums.d_hidden_MD, sums.d_table_VD, sums.d_bias_V)
        else:
            nats = _through(decoder, *inputs, into=None, scale=None)
            ctx.save_for_backward(*inputs)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> _Grads:
        if ctx.decoder.is_early:
            made = (None if d is None else d.mul_(scale) for d in ctx.saved_tensors)
            return (*made, None)
        sums = _Sums(*ctx.needs_input_grad[:3])
        _through(ctx.decoder, *ctx.saved_tensors, into=sums, scale=scale)
        return sums.d_hidden_MD, sums.d_table_VD, sums.d_bias_V, None


class _Sums:
    """Gradients as they are added up, chunk by chunk; None where none is wanted."""

    def __init__(self, wants_hidden: bool, wants_table: bool, wants_bias: bool) -> None:
        self.wants_hidden = wants_hidden
        self.wants_table, self.wants_bias = wants_table, wants_bias
        self.d_hidden_MD: Tensor | None = None
        self.d_table_VD: Tensor | None = None
        self.d_bias_V: Tensor | None = None

    def add(
        self, at: slice, hidden_MD: Tensor, weight_VD: Tensor, d_logits_RV: Tensor, d_bias_V: Tensor
    ) -> None:
        """What a chunk adds."""
        if self.wants_hidden:
            if self.d_hidden_MD is None:
                self.d_hidden_MD = torch.empty_like(hidden_MD)
            torch.mm(d_logits_RV, weight_VD, out=self.d_hidden_MD[at])
        if self.wants_table:
            if self.d_table_VD is None:
                self.d_table_VD = (d_logits_RV.t() @ hidden_MD[at]).float()
            elif hidden_MD.dtype == torch.float32:
                self.d_table_VD.addmm_(d_logits_RV.t(), hidden_MD[at])
            else:
                self.d_table_VD += d_logits_RV.t() @ hidden_MD[at]
        if self.wants_bias:
            self.d_bias_V = d_bias_V if self.d_bias_V is None else self.d_bias_V.add_(d_bias_V)


def _through(
    decoder: _Decoder,
    hidden_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    *,
    into: _Sums | None,
    scale: Tensor | None,
) -> Tensor:
    """The loss over all chunks; gradients, times `scale`, go into `into`."""
    with torch.autocast(hidden_MD.device.type, enabled=False):
        weight_VD = table_VD.to(decoder.dtype)

        def through_one(at: slice) -> Tensor:
            """In a function, so that a chunk's logits are gone before the next one's are made."""
            logits_RV = hidden_MD[at] @ weight_VD.t()
            targets_R = decoder.targets_M[at]
            if decoder.lib is not None:
                losses_R, d_bias_V = calls.cross_entropy(
                    decoder.lib, logits_RV, bias_V, targets_R.contiguous()
                )
            else:
                losses_R, logits_RV, d_bias_V = _cross_entropy(logits_RV, bias_V, targets_R, scale)
            if into is not None:
                into.add(at, hidden_MD, weight_VD, logits_RV, d_bias_V)
            return losses_R

        losses = [through_one(at) for at in row_slices(len(hidden_MD), decoder.rows)]
    return torch.cat(losses).sum()


def _cross_entropy(
    logits_RV: Tensor, bias_V: Tensor, targets_R: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of logits and bias, as the kernel has them; in place in fp32."""
    wide_RV = logits_RV.float()
    wide_RV += bias_V
    wide_RV -= wide_RV.amax(1, keepdim=True)
    columns_R1 = targets_R.clamp(min=0)[:, None]
    at_target_R1 = wide_RV.gather(1, columns_R1)
    total_R1 = wide_RV.exp_().sum(1, keepdim=True)
    is_none_R = targets_R == NO_TARGET
    losses_R = (total_R1.log() - at_target_R1)[:, 0].masked_fill_(is_none_R, 0.0)
    wide_RV /= total_R1
    wide_RV.scatter_add_(1, columns_R1, torch.full_like(at_target_R1, -1.0))
    wide_RV.masked_fill_(is_none_R[:, None], 0.0)
    if scale is not None:
        wide_RV *= scale
    return losses_R, logits_RV.copy_(wide_RV), wide_RV.sum(0)


def row_slices(count: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` that cover `count`; one even where there is nothing."""
    for start in range(0, max(count, 1), rows):
        yield slice(start, min(start + rows, count))
