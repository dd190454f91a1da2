"""Blocks, embeddings and the masked loss as single steps of autograd, on the C kernels.

What is won: nothing is saved that is cheap to make again, additions, dropouts, norms and bias
gradients ride along on passes that happen anyway, and weights are cast once. Parameters are inputs
and their gradients outputs, so hooks on them (DDP, FSDP) see what they always see. Arithmetic
outside the matrix products is fp32; the residual stream has the compute type.

Shape legend: T packed tokens, D width, F inner width, M rows wanted of T, V vocabulary, H heads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.batch import PackedBatch
from bertsmith.model.attention import query_and_rest
from bertsmith.model.config import Activation
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """What a block's pass needs besides tensors with gradients."""

    lib: ctypes.CDLL
    dtype: torch.dtype
    groups: calls.AttentionGroups
    eps: float
    activation: Activation
    drop_probs: Dropout
    drop_attended: Dropout
    drop_inner: Dropout

    @property
    def rows_M(self) -> Tensor | None:
        """Which tokens' outputs are wanted, ascending, int64; None: all of them."""
        return self.groups.rows_M


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParameters:
    """A block's parameters, in the order in which `_Block` takes them."""

    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    attention_gain: Tensor
    attention_shift: Tensor
    inner_weight: Tensor
    inner_bias: Tensor
    inner_out_weight: Tensor
    inner_out_bias: Tensor
    output_gain: Tensor
    output_shift: Tensor


def run_block(hidden_TD: Tensor, parameters: BlockParameters, plan: BlockPlan) -> Tensor:
    """One post-LayerNorm block: (T, D) to (T, D), or to (M, D) where rows are chosen."""
    p = parameters
    output_MD: Tensor = _Block.apply(  # type: ignore[no-untyped-call]
        hidden_TD.to(plan.dtype),
        p.qkv_weight,
        p.qkv_bias,
        p.out_weight,
        p.out_bias,
        p.attention_gain,
        p.attention_shift,
        p.inner_weight,
        p.inner_bias,
        p.inner_out_weight,
        p.inner_out_bias,
        p.output_gain,
        p.output_shift,
        plan,
    )
    return output_MD


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, *rest: Any) -> Tensor:
        parameters, plan = BlockParameters(**dict(zip(_NAMES, rest[:-1], strict=True))), rest[-1]
        with torch.autocast("cpu", enabled=False):
            output_MD, saved = _block_forward(hidden_TD.contiguous(), parameters, plan)
        ctx.save_for_backward(*saved)
        ctx.plan = plan
        return output_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_MD: Tensor) -> _Grads:
        with torch.autocast("cpu", enabled=False):
            return _block_backward(
                d_output_MD.contiguous(), ctx.saved_tensors, ctx.plan, ctx.needs_input_grad
            )


_NAMES = tuple(BlockParameters.__dataclass_fields__)


def _block_forward(
    hidden_TD: Tensor, parameters: BlockParameters, plan: BlockPlan
) -> tuple[Tensor, tuple[Tensor, ...]]:
    p, lib, dtype = parameters, plan.lib, plan.dtype
    qkv_weight, out_weight = p.qkv_weight.to(dtype), p.out_weight.to(dtype)
    inner_weight, inner_out_weight = p.inner_weight.to(dtype), p.inner_out_weight.to(dtype)
    # Every token is attended to; whatever else is done is done for the rows wanted alone.
    residual_MD = hidden_TD if plan.rows_M is None else hidden_TD[plan.rows_M]
    projected = _project(hidden_TD, residual_MD, qkv_weight, p.qkv_bias.to(dtype))
    context_MD, log_sums_MH = calls.attention_forward(
        lib, *_query_and_rest(projected), plan.groups, plan.drop_probs
    )
    middle_MD, *first_norm = calls.add_norm_forward(
        lib,
        residual_MD,
        F.linear(context_MD, out_weight, p.out_bias.to(dtype)),
        p.attention_gain,
        p.attention_shift,
        eps=plan.eps,
        drop=plan.drop_attended,
        rows_M=plan.rows_M,
    )
    inner_MF = F.linear(middle_MD, inner_weight, p.inner_bias.to(dtype))
    active_MF = calls.activate_forward(lib, inner_MF, plan.activation)
    output_MD, *second_norm = calls.add_norm_forward(
        lib,
        middle_MD,
        F.linear(active_MF, inner_out_weight, p.inner_out_bias.to(dtype)),
        p.output_gain,
        p.output_shift,
        eps=plan.eps,
        drop=plan.drop_inner,
        rows_M=plan.rows_M,
    )
    saved = (
        *(hidden_TD, residual_MD, context_MD, log_sums_MH, *first_norm, middle_MD, inner_MF),
        *(*second_norm, qkv_weight, out_weight, inner_weight, inner_out_weight),
        *(p.attention_gain, p.output_gain, *projected),
    )
    return output_MD, saved


def _block_backward(
    d_output_MD: Tensor, saved: tuple[Tensor, ...], plan: BlockPlan, needed: tuple[bool, ...]
) -> _Grads:
    lib = plan.lib
    hidden_TD, residual_MD, context_MD, log_sums_MH, *rest = saved
    first_MD, first_mean, first_inverse, middle_MD, inner_MF, *rest = rest
    second_MD, second_mean, second_inverse, qkv_weight, out_weight, *rest = rest
    inner_weight, inner_out_weight, attention_gain, output_gain, *projected = rest
    second = calls.add_norm_backward(
        lib,
        d_output_MD,
        None,
        second_MD,
        (second_mean, second_inverse),
        output_gain,
        drop=plan.drop_inner,
        rows_M=plan.rows_M,
    )
    active_MF, d_inner_MF, d_inner_bias = calls.activate_backward(
        lib, inner_MF, second.added_TD @ inner_out_weight, plan.activation
    )
    d_inner_out_weight = _weight_grad(second.added_TD, active_MF, needed=needed[9])
    del active_MF
    d_inner_weight = _weight_grad(d_inner_MF, middle_MD, needed=needed[7])
    first = calls.add_norm_backward(
        lib,
        d_inner_MF @ inner_weight,
        second.hidden_TD,
        first_MD,
        (first_mean, first_inverse),
        attention_gain,
        drop=plan.drop_attended,
        rows_M=plan.rows_M,
    )
    d_out_weight = _weight_grad(first.added_TD, context_MD, needed=needed[3])
    d_projected = [torch.empty_like(values) for values in projected]
    calls.attention_backward(
        lib,
        *_query_and_rest(projected),
        plan.groups,
        (context_MD, log_sums_MH),
        first.added_TD @ out_weight,
        plan.drop_probs,
        into=_query_and_rest(d_projected),
    )
    d_hidden_TD, d_qkv_weight, d_qkv_bias = _project_backward(
        d_projected, first.hidden_TD, (hidden_TD, residual_MD, qkv_weight), plan, needed[:3]
    )
    return (
        d_hidden_TD,
        d_qkv_weight,
        d_qkv_bias,
        d_out_weight,
        first.bias_D,
        first.gain_D,
        first.shift_D,
        d_inner_weight,
        d_inner_bias,
        d_inner_out_weight,
        second.bias_D,
        second.gain_D,
        second.shift_D,
        None,
    )


def _project(
    hidden_TD: Tensor, residual_MD: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side; or the queries of some rows, and the rest of all."""
    if residual_MD is hidden_TD:
        return (F.linear(hidden_TD, weight, bias),)
    width = hidden_TD.shape[1]
    query_MD = F.linear(residual_MD, weight[:width], bias[:width])
    return query_MD, F.linear(hidden_TD, weight[width:], bias[width:])


def _query_and_rest(projected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The queries, and the keys and values."""
    if len(projected) == 1:
        return query_and_rest(projected[0])
    return projected[0], projected[1]


def _project_backward(
    d_projected: Sequence[Tensor],
    d_residual_MD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    plan: BlockPlan,
    needed: tuple[bool, ...],
) -> _Grads:
    """Gradients of a block's input (from its two uses), and of the projection's weight and bias."""
    hidden_TD, residual_MD, weight = inputs
    d_hidden_TD = d_weight = d_bias = None
    if plan.rows_M is None:
        (d_qkv_TD,) = d_projected
        if needed[0]:
            d_hidden_TD = torch.addmm(d_residual_MD, d_qkv_TD, weight)
        d_weight = _weight_grad(d_qkv_TD, hidden_TD, needed=needed[1])
        if needed[2]:
            d_bias = calls.column_sums(plan.lib, d_qkv_TD)
        return d_hidden_TD, d_weight, d_bias
    width = hidden_TD.shape[1]
    d_query_MD, d_rest_TD = d_projected
    if needed[0]:
        d_rows_MD = torch.addmm(d_residual_MD, d_query_MD, weight[:width])
        d_hidden_TD = (d_rest_TD @ weight[width:]).index_add_(0, plan.rows_M, d_rows_MD)
    if needed[1]:
        d_weight = torch.cat([d_query_MD.t() @ residual_MD, d_rest_TD.t() @ hidden_TD]).float()
    if needed[2]:
        d_bias = torch.cat([calls.column_sums(plan.lib, d) for d in d_projected])
    return d_hidden_TD, d_weight, d_bias


def _weight_grad(d_output: Tensor, inputs: Tensor, *, needed: bool) -> Tensor | None:
    """Gradient of a linear map's weight in fp32, from gradients and inputs of the compute type."""
    return (d_output.t() @ inputs).float() if needed else None


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
        with torch.autocast("cpu", enabled=False):
            d_hidden_MD = ((d_logits_MV @ weight_VD).float() * scale).to(hidden_MD.dtype)
            scaled_MD = (hidden_MD.float() * scale).to(hidden_MD.dtype)
            d_table_VD = _weight_grad(d_logits_MV, scaled_MD, needed=True)
        return d_hidden_MD, d_table_VD, d_bias_V * scale, None, None


def groups_of(batch: PackedBatch, *, heads: int, rows_M: Tensor | None) -> calls.AttentionGroups:
    """Which queries and keys belong together, for queries of all tokens or of some."""
    starts_N1 = query_starts_N1 = batch.starts_N1.contiguous()
    if rows_M is not None:
        query_starts_N1 = torch.searchsorted(rows_M, starts_N1.to(rows_M.dtype)).to(torch.int32)
    return calls.AttentionGroups(
        starts_N1=starts_N1,
        query_starts_N1=query_starts_N1,
        rows_M=None if rows_M is None else rows_M.contiguous(),
        longest=batch.longest,
        heads=heads,
    )


def ids_of(batch: PackedBatch) -> calls.Ids:
    """The batch's row numbers, as the kernels want them."""
    return calls.Ids(
        token_T=batch.input_ids_T.contiguous(),
        position_T=batch.position_ids_T.contiguous(),
        segment_T=batch.segment_ids_T.contiguous(),
    )
