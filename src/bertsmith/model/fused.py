"""Embeddings and the masked loss as single steps of autograd, on the C kernels.

Blocks are in fused_block.py.

What is won: nothing is saved that is cheap to make again, additions, dropouts, norms and bias
gradients ride along on passes that happen anyway, and weights are cast once. Parameters are inputs
and their gradients outputs, so hooks on them (DDP, FSDP) see what they always see. Arithmetic
outside the matrix products is fp32; the residual stream has the compute type.

Shape legend: T packed tokens, D width, F inner width, M rows wanted of T, V vocabulary, H heads.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.batch import PackedBatch
from bertsmith.model.dropout import Dropout
from bertsmith.model.kernels import build, calls

_Grads = tuple[Tensor | None, ...]


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """The type of matrix products: autocast's where it is on, else the parameter's own."""
    kind = parameter.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return parameter.dtype


def fused_library(parameter: Tensor) -> ctypes.CDLL | None:
    """The kernels for a model with such parameters; None where the plain path has to do."""
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        return None
    return build.load_for(compute_dtype(parameter))


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedPlan:
    """What an embedding pass needs besides tensors with gradients."""

    lib: ctypes.CDLL
    ids: calls.Ids
    eps: float
    drop: Dropout
    dtype: torch.dtype


def embed(tables: calls.Tables, plan: EmbedPlan) -> tuple[Tensor, Tensor]:
    """Hidden states (T, D), and the token table for a decoder tied to it.

    A decoder that uses this table hands its dense gradient on to here, where the sparse one of the
    input is added in place: the two never exist as two tables.
    """
    hidden_TD, table_VD = _Embed.apply(  # type: ignore[no-untyped-call]
        tables.token_VD,
        tables.position_PD,
        tables.segment_SD,
        tables.gain_D,
        tables.shift_D,
        plan,
    )
    return hidden_TD, table_VD


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token_VD: Tensor,
        position_PD: Tensor,
        segment_SD: Tensor,
        gain_D: Tensor,
        shift_D: Tensor,
        plan: EmbedPlan,
    ) -> tuple[Tensor, Tensor]:
        tables = calls.Tables(
            token_VD=token_VD,
            position_PD=position_PD,
            segment_SD=segment_SD,
            gain_D=gain_D,
            shift_D=shift_D,
        )
        hidden_TD, mean_T, inverse_T = calls.embed_forward(
            plan.lib, plan.ids, tables, eps=plan.eps, drop=plan.drop, dtype=plan.dtype
        )
        ctx.save_for_backward(token_VD, position_PD, segment_SD, gain_D, shift_D, mean_T, inverse_T)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return hidden_TD, token_VD.view_as(token_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden_TD: Tensor | None, d_table_VD: Tensor | None) -> _Grads:
        if d_hidden_TD is None:
            return d_table_VD, None, None, None, None, None
        *parameters, mean_T, inverse_T = ctx.saved_tensors
        names = ("token_VD", "position_PD", "segment_SD", "gain_D", "shift_D")
        tables = calls.Tables(**dict(zip(names, parameters, strict=True)))
        grads = [torch.zeros_like(p) for p in parameters[1:]]
        grads.insert(0, torch.zeros_like(parameters[0]) if d_table_VD is None else d_table_VD)
        calls.embed_backward(
            ctx.plan.lib,
            ctx.plan.ids,
            tables,
            d_hidden_TD.contiguous(),
            (mean_T, inverse_T),
            drop=ctx.plan.drop,
            into=calls.Tables(**dict(zip(names, grads, strict=True))),
        )
        return (*grads, None)


def weight_grad(d_output: Tensor, inputs: Tensor | None, *, needed: bool) -> Tensor | None:
    """Gradient of a linear map's weight in fp32, from gradients and inputs of the compute type.

    The inputs may be missing where the gradient is not needed.
    """
    if not needed:
        return None
    assert inputs is not None, "kept for this"
    return (d_output.t() @ inputs).float()


def masked_loss(
    hidden_MD: Tensor, table_VD: Tensor, bias_V: Tensor, targets_M: Tensor
) -> Tensor | None:
    """Summed cross-entropy of hidden @ table' + bias, a scalar; None where there are no kernels.

    The logits exist once, in the compute type, and become their own gradient.
    """
    lib = fused_library(table_VD)
    if lib is None:
        return None
    nats: Tensor = _MaskedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_MD.to(compute_dtype(table_VD)), table_VD, bias_V, targets_M, lib
    )
    return nats


class _MaskedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        table_VD: Tensor,
        bias_V: Tensor,
        targets_M: Tensor,
        lib: ctypes.CDLL,
    ) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight_VD = table_VD.to(hidden_MD.dtype)
            logits_MV = hidden_MD @ weight_VD.t()
            losses_M, d_bias_V = calls.cross_entropy(lib, logits_MV, bias_V, targets_M)
        ctx.save_for_backward(hidden_MD, weight_VD, logits_MV, d_bias_V)
        return losses_M.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> _Grads:
        hidden_MD, weight_VD, d_logits_MV, d_bias_V = ctx.saved_tensors
        d_hidden_MD = d_table_VD = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                d_hidden_MD = ((d_logits_MV @ weight_VD).float() * scale).to(hidden_MD.dtype)
            if ctx.needs_input_grad[1]:
                scaled_MD = (hidden_MD.float() * scale).to(hidden_MD.dtype)
                d_table_VD = weight_grad(d_logits_MV, scaled_MD, needed=True)
        return d_hidden_MD, d_table_VD, d_bias_V * scale, None, None


def groups_of(batch: PackedBatch, *, heads: int, rows_M: Tensor | None) -> calls.AttentionGroups:
    """Which queries and keys belong together, for queries of all tokens or of some."""
    starts_N1 = query_starts_N1 = batch.starts_N1.contiguous()
    longest = batch.longest
    if rows_M is not None:
        query_starts_N1 = torch.searchsorted(rows_M, starts_N1.to(rows_M.dtype)).to(torch.int32)
        # A row may be wanted several times over (`encoder.with_repeats`).
        longest = max(longest, int(query_starts_N1.diff().max()))
    return calls.AttentionGroups(
        starts_N1=starts_N1,
        query_starts_N1=query_starts_N1,
        rows_M=None if rows_M is None else rows_M.contiguous(),
        longest=longest,
        heads=heads,
    )


def ids_of(batch: PackedBatch) -> calls.Ids:
    """The batch's row numbers, as the kernels want them."""
    return calls.Ids(
        token_T=batch.input_ids_T.contiguous(),
        position_T=batch.position_ids_T.contiguous(),
        segment_T=batch.segment_ids_T.contiguous(),
    )
