"""A block as a single step of autograd, on the C kernels; how much it keeps is a choice.

`none` keeps all that costs a product or a norm to make again. `selective` drops both norms' outputs
and the widest product; `full` keeps the sum before the last norm alone. A block's input is the last
norm's output of the block before, so blocks that recompute keep that norm's sum in its place: one
tensor then serves as the input of a block and spares the one before its last, largest product.
All ways give the same gradients to the bit: products and kernels are the same, on the same values.

Shape legend: T packed tokens, D width, F inner width, M rows wanted of T, H heads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.model.attention import query_and_rest
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import Activation
from bertsmith.model.dropout import Dropout
from bertsmith.model.fused import weight_grad
from bertsmith.model.kernels import calls

_Grads = tuple[Tensor | None, ...]


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

    mode: BlockMode
    """How much is kept for the backward pass."""

    hands_on: bool
    """Whether the next block makes its input again, from this one's last norm."""

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

    def cast(self, dtype: torch.dtype) -> "BlockParameters":
        """Weights and biases in the type of products; norms as they are."""
        linear = ("qkv", "out", "inner", "inner_out")
        names = [f"{name}_{kind}" for name in linear for kind in ("weight", "bias")]
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """What a norm took in, and its moments."""

    sum_MD: Tensor
    mean_M: Tensor
    inverse_M: Tensor

    def normalized(self, lib: ctypes.CDLL, gain_D: Tensor, shift_D: Tensor) -> Tensor:
        """The norm's output once more."""
        return calls.norm_again(lib, self.sum_MD, (self.mean_M, self.inverse_M), gain_D, shift_D)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastNorm(_Sum):
    """What a block's output was made of, and can be made of again."""

    gain_D: Tensor
    """A copy: where parameters are spread over ranks, those of another block are not at hand."""

    shift_D: Tensor


def run_block(
    hidden_TD: Tensor, parameters: BlockParameters, plan: BlockPlan, before: LastNorm | None
) -> tuple[Tensor, LastNorm | None]:
    """One post-LayerNorm block: (T, D) to (T, D), or to (M, D) where rows are chosen.

    Args:
        hidden_TD: The input.
        parameters: The block's.
        plan: How to go about it.
        before: What the input was made of, if the block before handed that on.

    Returns:
        The output, and what it was made of if the plan says to hand it on.
    """
    output_MD, *last = _Block.apply(  # type: ignore[no-untyped-call]
        hidden_TD.to(plan.dtype), *_tensors(parameters), plan, before
    )
    if not plan.hands_on:
        return output_MD, None
    sum_MD, mean_M, inverse_M = last
    return output_MD, LastNorm(
        sum_MD=sum_MD,
        mean_M=mean_M,
        inverse_M=inverse_M,
        gain_D=parameters.output_gain.detach().clone(),
        shift_D=parameters.output_shift.detach().clone(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Input:
    hidden_TD: Tensor | None
    """None where it is not kept, as no weight that it meets is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attended:
    query_MD: Tensor
    """Queries, or queries, keys and values side by side where all rows are wanted."""

    rest_TD: Tensor | None
    """Keys and values of all tokens, where queries are made for some rows alone."""

    context_MD: Tensor
    log_sums_MH: Tensor

    @property
    def projected(self) -> tuple[Tensor, ...]:
        """What was made of the input."""
        return (self.query_MD,) if self.rest_TD is None else (self.query_MD, self.rest_TD)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inner:
    middle_MD: Tensor | None
    """As a block's input."""

    inner_MF: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """All that a forward pass makes and the gradient needs."""

    input: _Input
    attended: _Attended
    first: _Sum
    inner: _Inner
    second: _Sum


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        *tensors, plan, before = rest
        parameters = BlockParameters(**dict(zip(_NAMES, tensors, strict=True)))
        with torch.autocast("cpu", enabled=False):
            cast = parameters.cast(plan.dtype)
            output_MD, made = _block_forward(hidden_TD.contiguous(), cast, plan)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        made = _as_needed(made, plan, ctx.needs_input_grad)
        is_input_made_again = before is not None and (
            plan.mode == "full" or made.input.hidden_TD is not None
        )
        before_or_input = before if is_input_made_again else made.input
        match plan.mode:
            case "none":
                _save(ctx, cast, made.input, made.attended, made.first, made.inner, made.second)
            case "selective":
                _save(ctx, parameters, before_or_input, made.attended, made.first, made.second)
            case "full":
                _save(ctx, parameters, before_or_input, made.second)
        if not plan.hands_on:
            return output_MD, None, None, None
        last = (made.second.sum_MD, made.second.mean_M, made.second.inverse_M)
        ctx.mark_non_differentiable(*last)
        return output_MD, *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_MD: Tensor | None, *_: None) -> _Grads:
        if d_output_MD is None:
            return (None,) * len(ctx.needs_input_grad)
        with torch.autocast("cpu", enabled=False):
            made, parameters = _made_again(ctx)
            grads = _block_backward(
                d_output_MD.contiguous(), made, parameters, ctx.plan, ctx.needs_input_grad
            )
        return *grads, None, None


_NAMES = tuple(f.name for f in fields(BlockParameters))
_QKV_WEIGHT, _OUT_WEIGHT, _INNER_WEIGHT, _INNER_OUT_WEIGHT = (
    1 + _NAMES.index(f"{name}_weight") for name in ("qkv", "out", "inner", "inner_out")
)
"""Places among the inputs of `_Block`, the first of which is the hidden state."""


def _tensors(part: Any) -> list[Any]:
    """The values of a dataclass, in order."""
    return [getattr(part, f.name) for f in fields(part)]


def _save(ctx: Any, *parts: Any) -> None:
    """Keep dataclasses of tensors for `_saved`."""
    ctx.kinds = [type(part) for part in parts]
    ctx.save_for_backward(*(tensor for part in parts for tensor in _tensors(part)))


def _saved(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [kind(**{f.name: next(tensors) for f in fields(kind)}) for kind in ctx.kinds]


def _as_needed(made: _Made, plan: BlockPlan, needed: Sequence[bool]) -> _Made:
    """Without the inputs of products whose weights are frozen: no gradient is made of them."""
    block_input, inner = made.input, made.inner
    if not needed[_QKV_WEIGHT] and plan.mode != "full":
        block_input = _Input(hidden_TD=None)
    if not needed[_INNER_WEIGHT]:
        inner = replace(inner, middle_MD=None)
    return replace(made, input=block_input, inner=inner)


def _made_again(ctx: Any) -> tuple[_Made, BlockParameters]:
    """All that the forward pass made, and parameters in the type of products."""
    plan: BlockPlan = ctx.plan
    p: BlockParameters
    before: LastNorm | _Input
    p, before, *rest = _saved(ctx)
    if plan.mode == "none":
        assert isinstance(before, _Input), "an input is kept as it is"
        attended, first, inner, second = rest
        return _Made(input=before, attended=attended, first=first, inner=inner, second=second), p
    p = p.cast(plan.dtype)
    if isinstance(before, LastNorm):
        hidden_TD = before.normalized(plan.lib, before.gain_D, before.shift_D)
        block_input = _Input(hidden_TD=hidden_TD)
    else:
        block_input = before
    if plan.mode == "selective":
        attended, first, second = rest
        middle_MD = first.normalized(plan.lib, p.attention_gain, p.attention_shift)
    else:
        (second,) = rest
        attended = _attend(block_input, p, plan)
        middle_MD, first = _first_norm(block_input, attended, p, plan)
    inner = _inner(middle_MD, p)
    return (
        _Made(input=block_input, attended=attended, first=first, inner=inner, second=second),
        p,
    )


def _block_forward(
    hidden_TD: Tensor, parameters: BlockParameters, plan: BlockPlan
) -> tuple[Tensor, _Made]:
    """The output, and what was made on the way; parameters are of the type of products."""
    p, block_input = parameters, _Input(hidden_TD=hidden_TD)
    attended = _attend(block_input, p, plan)
    middle_MD, first = _first_norm(block_input, attended, p, plan)
    inner = _inner(middle_MD, p)
    active_MF = calls.activate_forward(plan.lib, inner.inner_MF, plan.activation)
    output_MD, sum_MD, mean_M, inverse_M = calls.add_norm_forward(
        plan.lib,
        middle_MD,
        F.linear(active_MF, p.inner_out_weight, p.inner_out_bias),
        p.output_gain,
        p.output_shift,
        eps=plan.eps,
        drop=plan.drop_inner,
        rows_M=plan.rows_M,
    )
    second = _Sum(sum_MD=sum_MD, mean_M=mean_M, inverse_M=inverse_M)
    made = _Made(input=block_input, attended=attended, first=first, inner=inner, second=second)
    return output_MD, made


def _residual(block_input: _Input, plan: BlockPlan) -> Tensor:
    """Every token is attended to; whatever else is done is done for the rows wanted alone."""
    hidden_TD = block_input.hidden_TD
    assert hidden_TD is not None, "kept, or made again"
    return hidden_TD if plan.rows_M is None else hidden_TD[plan.rows_M]


def _attend(block_input: _Input, p: BlockParameters, plan: BlockPlan) -> _Attended:
    """Projections, and attention."""
    hidden_TD = block_input.hidden_TD
    assert hidden_TD is not None, "kept, or made again"
    if plan.rows_M is None:
        query_MD, rest_TD = F.linear(hidden_TD, p.qkv_weight, p.qkv_bias), None
    else:
        width = hidden_TD.shape[1]
        residual_MD = _residual(block_input, plan)
        query_MD = F.linear(residual_MD, p.qkv_weight[:width], p.qkv_bias[:width])
        rest_TD = F.linear(hidden_TD, p.qkv_weight[width:], p.qkv_bias[width:])
    projected = (query_MD,) if rest_TD is None else (query_MD, rest_TD)
    context_MD, log_sums_MH = calls.attention_forward(
        plan.lib, *_query_and_rest(projected), plan.groups, plan.drop_probs
    )
    return _Attended(
        query_MD=query_MD, rest_TD=rest_TD, context_MD=context_MD, log_sums_MH=log_sums_MH
    )


def _first_norm(
    block_input: _Input, attended: _Attended, p: BlockParameters, plan: BlockPlan
) -> tuple[Tensor, _Sum]:
    """The residual stream after attention, and what it was made of."""
    middle_MD, sum_MD, mean_M, inverse_M = calls.add_norm_forward(
        plan.lib,
        _residual(block_input, plan),
        F.linear(attended.context_MD, p.out_weight, p.out_bias),
        p.attention_gain,
        p.attention_shift,
        eps=plan.eps,
        drop=plan.drop_attended,
        rows_M=plan.rows_M,
    )
    return middle_MD, _Sum(sum_MD=sum_MD, mean_M=mean_M, inverse_M=inverse_M)


def _inner(middle_MD: Tensor, p: BlockParameters) -> _Inner:
    """The feed-forward half up to its activation."""
    inner_MF = F.linear(middle_MD, p.inner_weight, p.inner_bias)
    return _Inner(middle_MD=middle_MD, inner_MF=inner_MF)


def _block_backward(
    d_output_MD: Tensor,
    made: _Made,
    parameters: BlockParameters,
    plan: BlockPlan,
    needed: Sequence[bool],
) -> _Grads:
    """Gradients of the input and of each parameter."""
    lib, p = plan.lib, parameters
    second = calls.add_norm_backward(
        lib,
        d_output_MD,
        None,
        made.second.sum_MD,
        (made.second.mean_M, made.second.inverse_M),
        p.output_gain,
        drop=plan.drop_inner,
        rows_M=plan.rows_M,
    )
    active_MF, d_inner_MF, d_inner_bias = calls.activate_backward(
        lib, made.inner.inner_MF, second.added_TD @ p.inner_out_weight, plan.activation
    )
    d_inner_out_weight = weight_grad(second.added_TD, active_MF, needed=needed[_INNER_OUT_WEIGHT])
    del active_MF
    d_inner_weight = weight_grad(d_inner_MF, made.inner.middle_MD, needed=needed[_INNER_WEIGHT])
    first = calls.add_norm_backward(
        lib,
        d_inner_MF @ p.inner_weight,
        second.hidden_TD,
        made.first.sum_MD,
        (made.first.mean_M, made.first.inverse_M),
        p.attention_gain,
        drop=plan.drop_attended,
        rows_M=plan.rows_M,
    )
    attended = made.attended
    d_out_weight = weight_grad(first.added_TD, attended.context_MD, needed=needed[_OUT_WEIGHT])
    d_projected = [torch.empty_like(values) for values in attended.projected]
    calls.attention_backward(
        lib,
        *_query_and_rest(attended.projected),
        plan.groups,
        (attended.context_MD, attended.log_sums_MH),
        first.added_TD @ p.out_weight,
        plan.drop_probs,
        into=_query_and_rest(d_projected),
    )
    d_hidden_TD, d_qkv_weight, d_qkv_bias = _project_backward(
        d_projected, first.hidden_TD, made.input, p.qkv_weight, plan, needed[:3]
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
    )


def _query_and_rest(projected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The queries, and the keys and values."""
    if len(projected) == 1:
        return query_and_rest(projected[0])
    return projected[0], projected[1]


def _project_backward(
    d_projected: Sequence[Tensor],
    d_residual_MD: Tensor,
    block_input: _Input,
    weight: Tensor,
    plan: BlockPlan,
    needed: Sequence[bool],
) -> _Grads:
    """Gradients of a block's input (from its two uses), and of the projection's weight and bias."""
    hidden_TD = block_input.hidden_TD
    d_hidden_TD = d_weight = d_bias = None
    if plan.rows_M is None:
        (d_qkv_TD,) = d_projected
        if needed[0]:
            d_hidden_TD = torch.addmm(d_residual_MD, d_qkv_TD, weight)
        d_weight = weight_grad(d_qkv_TD, hidden_TD, needed=needed[1])
        if needed[2]:
            d_bias = calls.column_sums(plan.lib, d_qkv_TD)
        return d_hidden_TD, d_weight, d_bias
    width = weight.shape[1]
    d_query_MD, d_rest_TD = d_projected
    if needed[0]:
        d_rows_MD = torch.addmm(d_residual_MD, d_query_MD, weight[:width])
        d_hidden_TD = (d_rest_TD @ weight[width:]).index_add_(0, plan.rows_M, d_rows_MD)
    if needed[1]:
        assert hidden_TD is not None, "kept, or made again"
        residual_MD = _residual(block_input, plan)
        d_weight = torch.cat([d_query_MD.t() @ residual_MD, d_rest_TD.t() @ hidden_TD]).float()
    if needed[2]:
        d_bias = torch.cat([calls.column_sums(plan.lib, d) for d in d_projected])
    return d_hidden_TD, d_weight, d_bias
