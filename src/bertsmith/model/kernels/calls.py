"""The kernels as functions of tensors: addresses and shapes are checked here, once.

Every function takes the library of the storage type (`build.load`) and contiguous CPU tensors.
Shape legend: T packed tokens, D width, F inner width, M masked positions, V vocabulary, H heads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.model.dropout import Dropout

ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "relu": 2}


class _CDropout(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_uint64),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class _CAdamWStep(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("rate", "shrink", "beta1", "beta2", "root", "eps", "factor")
    )


def _at(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous(), "kernels read contiguous tensors"
    return ctypes.c_void_p(tensor.data_ptr())


def _maybe(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """The address; NULL for None."""
    return None if tensor is None else _at(tensor)


def _check(status: int) -> None:
    """Raise what torch's own allocator would lead to, if a kernel had no memory for its work."""
    if status:
        raise MemoryError("a kernel has no memory for its work")


def _size(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def _float(number: float) -> ctypes.c_float:
    return ctypes.c_float(number)


def _drop(drop: Dropout) -> object:
    return ctypes.byref(_CDropout(drop.key, drop.threshold, drop.scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """The three embedding tables and their norm, fp32 and contiguous."""

    token_VD: Tensor
    position_PD: Tensor
    segment_SD: Tensor
    gain_D: Tensor
    shift_D: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """Which rows of the tables, int64."""

    token_T: Tensor
    position_T: Tensor
    segment_T: Tensor


def embed_forward(
    lib: ctypes.CDLL, ids: Ids, tables: Tables, *, eps: float, drop: Dropout, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised sum of the three rows, and each row's mean and 1/deviation."""
    rows, width = len(ids.token_T), tables.token_VD.shape[1]
    hidden_TD = torch.empty(rows, width, dtype=dtype)
    mean_T, inverse_T = torch.empty(rows), torch.empty(rows)
    status = lib.embed_forward(
        _size(rows), _size(width), _at(ids.token_T), _at(ids.position_T), _at(ids.segment_T),
        _at(tables.token_VD), _at(tables.position_PD), _at(tables.segment_SD),
        _at(tables.gain_D), _at(tables.shift_D), _float(eps), _drop(drop),
        _at(hidden_TD), _at(mean_T), _at(inverse_T),
    )  # fmt: skip
    _check(status)
    return hidden_TD, mean_T, inverse_T


def embed_backward(
    lib: ctypes.CDLL,
    ids: Ids,
    tables: Tables,
    d_hidden_TD: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    drop: Dropout,
    into: Tables,
) -> None:
    """Adds the gradients of every table and of the norm to `into`."""
    rows, width = d_hidden_TD.shape
    scratch_TD = torch.empty(rows, width)
    status = lib.embed_backward(
        _size(rows), _size(width), _at(ids.token_T), _at(ids.position_T), _at(ids.segment_T),
        _at(tables.token_VD), _at(tables.position_PD), _at(tables.segment_SD), _at(tables.gain_D),
        _drop(drop), _at(d_hidden_TD), _at(moments[0]), _at(moments[1]), _at(scratch_TD),
        _at(into.token_VD), _at(into.position_PD), _at(into.segment_SD),
        _at(into.gain_D), _at(into.shift_D),
    )  # fmt: skip
    _check(status)


def add_norm_forward(
    lib: ctypes.CDLL,
    hidden_TD: Tensor,
    added_TD: Tensor,
    gain_D: Tensor,
    shift_D: Tensor,
    *,
    eps: float,
    drop: Dropout,
    rows_M: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm(hidden + dropout(added)); then, for the gradient, the sum, means, 1/deviations.

    The sum takes the place of `added`. Rows are dropped by their number in `rows_M`, if given.
    """
    rows, width = hidden_TD.shape
    out_TD = torch.empty_like(hidden_TD)
    mean_T, inverse_T = torch.empty(rows), torch.empty(rows)
    status = lib.add_norm_forward(
        _size(rows), _size(width), _at(hidden_TD), _at(added_TD), _at(gain_D), _at(shift_D),
        _float(eps), _drop(drop), _maybe(rows_M),
        _at(added_TD), _at(out_TD), _at(mean_T), _at(inverse_T),
    )  # fmt: skip
    _check(status)
    return out_TD, added_TD, mean_T, inverse_T


def norm_again(
    lib: ctypes.CDLL,
    sum_TD: Tensor,
    moments: tuple[Tensor, Tensor],
    gain_D: Tensor,
    shift_D: Tensor,
) -> Tensor:
    """The output of `add_norm_forward`, to the bit, from its sum, means and 1/deviations."""
    rows, width = sum_TD.shape
    out_TD = torch.empty_like(sum_TD)
    lib.norm_again(
        _size(rows), _size(width), _at(sum_TD), _at(moments[0]), _at(moments[1]),
        _at(gain_D), _at(shift_D), _at(out_TD),
    )  # fmt: skip
    return out_TD


@dataclass(frozen=True, kw_only=True, slots=True)
class NormGrads:
    """Gradients of an add-and-norm."""

    hidden_TD: Tensor
    added_TD: Tensor
    gain_D: Tensor
    shift_D: Tensor
    bias_D: Tensor
    """Column sums of `added_TD`: the gradient of the bias of what was added."""


def add_norm_backward(
    lib: ctypes.CDLL,
    d_out_TD: Tensor,
    also_TD: Tensor | None,
    sum_TD: Tensor,
    moments: tuple[Tensor, Tensor],
    gain_D: Tensor,
    *,
    drop: Dropout,
    rows_M: Tensor | None,
) -> NormGrads:
    """Gradients of `add_norm_forward` for `d_out` plus `also`."""
    rows, width = d_out_TD.shape
    d_hidden_TD = torch.empty_like(d_out_TD)
    d_added_TD = torch.empty_like(d_out_TD) if drop.threshold else d_hidden_TD
    gains_D, shifts_D, biases_D = torch.zeros(3, width).unbind(0)
    status = lib.add_norm_backward(
        _size(rows), _size(width), _at(d_out_TD), _maybe(also_TD),
        _at(sum_TD), _at(moments[0]), _at(moments[1]), _at(gain_D),
        _drop(drop), _maybe(rows_M),
        _at(d_hidden_TD), _at(d_added_TD), _at(gains_D), _at(shifts_D), _at(biases_D),
    )  # fmt: skip
    _check(status)
    return NormGrads(
        hidden_TD=d_hidden_TD,
        added_TD=d_added_TD,
        gain_D=gains_D,
        shift_D=shifts_D,
        bias_D=biases_D,
    )


def column_sums(lib: ctypes.CDLL, values_TD: Tensor) -> Tensor:
    """fp32 sums over the rows."""
    rows, width = values_TD.shape
    sums_D = torch.zeros(width)
    _check(lib.column_sums(_size(rows), _size(width), _at(values_TD), _at(sums_D)))
    return sums_D


Activation = Literal["gelu", "gelu_new", "relu"]


def activate_forward(lib: ctypes.CDLL, values_TF: Tensor, activation: Activation) -> Tensor:
    """The activation, elementwise."""
    rows, width = values_TF.shape
    out_TF = torch.empty_like(values_TF)
    kind = ctypes.c_int(ACTIVATIONS[activation])
    lib.activate_forward(_size(rows), _size(width), kind, _at(values_TF), _at(out_TF))
    return out_TF


def activate_backward(
    lib: ctypes.CDLL, values_TF: Tensor, d_out_TF: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation again, its gradient (in the place of `d_out`), and column sums of that."""
    rows, width = values_TF.shape
    out_TF, sums_F = torch.empty_like(values_TF), torch.zeros(width)
    status = lib.activate_backward(
        _size(rows), _size(width), ctypes.c_int(ACTIVATIONS[activation]), _at(values_TF),
        _at(d_out_TF), _at(out_TF), _at(d_out_TF), _at(sums_F),
    )  # fmt: skip
    _check(status)
    return out_TF, d_out_TF, sums_F


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGroups:
    """Which queries and keys of a pack belong together."""

    starts_N1: Tensor
    """Where the keys of each sequence start, then T, int32."""

    query_starts_N1: Tensor
    """Where its queries start, then M, int32; the same tensor if all tokens have queries."""

    rows_M: Tensor | None
    """The token of each query, ascending, int64; None if all tokens have queries."""

    longest: int
    heads: int


class _CAttention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sequences", "longest", "heads", "width")),
        *((name, ctypes.c_void_p) for name in ("starts", "query_starts", "rows")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride")),
        ("scale", ctypes.c_float),
    )


def attention_forward(
    lib: ctypes.CDLL, query_MD: Tensor, key_value_TD: Tensor, groups: AttentionGroups, drop: Dropout
) -> tuple[Tensor, Tensor]:
    """Context (M, D) and the log-sums of the softmaxes (M, H).

    Args:
        lib: Of the storage type.
        query_MD: Queries; rows may be further apart than they are wide.
        key_value_TD: Keys and values side by side, (T, 2 D), likewise.
        groups: Which belong together.
        drop: Dropout of the probabilities, by token, head and the key's place in its sequence.
    """
    context_MD = query_MD.new_empty(query_MD.shape)
    log_sums_MH = torch.empty(len(query_MD), groups.heads)
    status = lib.attention_forward(
        _attention_shape(query_MD, key_value_TD, groups), _first(query_MD), _first(key_value_TD),
        _drop(drop), _at(context_MD), _at(log_sums_MH),
    )  # fmt: skip
    _check(status)
    return context_MD, log_sums_MH


def attention_backward(
    lib: ctypes.CDLL,
    query_MD: Tensor,
    key_value_TD: Tensor,
    groups: AttentionGroups,
    forward: tuple[Tensor, Tensor],
    d_context_MD: Tensor,
    drop: Dropout,
    *,
    into: tuple[Tensor, Tensor],
) -> None:
    """Writes the gradients of queries and of keys and values, given the forward's results.

    `into` is laid out as `query_MD` and `key_value_TD`, and wholly written.
    """
    for out, like in zip(into, (query_MD, key_value_TD), strict=True):
        assert (out.shape, out.stride()) == (like.shape, like.stride()), "gradients as inputs"
    status = lib.attention_backward(
        _attention_shape(query_MD, key_value_TD, groups), _first(query_MD), _first(key_value_TD),
        _at(forward[0]), _at(d_context_MD), _at(forward[1]), _drop(drop),
        _first(into[0]), _first(into[1]),
    )  # fmt: skip
    _check(status)


def _first(rows: Tensor) -> ctypes.c_void_p:
    """Address of a matrix whose rows are contiguous."""
    assert rows.stride(1) == 1, "kernels read contiguous rows"
    return ctypes.c_void_p(rows.data_ptr())


def _attention_shape(query_MD: Tensor, key_value_TD: Tensor, groups: AttentionGroups) -> object:
    """The C structure."""
    width = query_MD.shape[1] // groups.heads
    return ctypes.byref(
        _CAttention(
            len(groups.starts_N1) - 1,
            groups.longest,
            groups.heads,
            width,
            _at(groups.starts_N1),
            _at(groups.query_starts_N1),
            None if groups.rows_M is None else _at(groups.rows_M),
            query_MD.stride(0),
            key_value_TD.stride(0),
            width**-0.5,
        )
    )


def cross_entropy(
    lib: ctypes.CDLL, logits_MV: Tensor, bias_V: Tensor, targets_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of each row, and the bias's gradient; `logits` become the gradient of the sum."""
    rows, vocabulary = logits_MV.shape
    losses_M, d_bias_V = torch.empty(rows), torch.zeros(vocabulary)
    status = lib.cross_entropy(
        _size(rows), _size(vocabulary), _at(logits_MV), _at(bias_V), _at(targets_M),
        _at(losses_M), _at(d_bias_V),
    )  # fmt: skip
    _check(status)
    return losses_M, d_bias_V


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _sizes(
    tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> ctypes.Array[ctypes.c_int64]:
    for tensor in tensors:
        assert tensor.is_contiguous(), "kernels read contiguous tensors"
        assert tensor.dtype == dtype, f"the kernel is for {dtype}"
    return (ctypes.c_int64 * len(tensors))(*(t.numel() for t in tensors))


def sum_of_squares(lib: ctypes.CDLL, tensors: Sequence[Tensor]) -> float:
    """Over all elements of fp32 tensors, in float64."""
    lib.sum_of_squares.restype = ctypes.c_double
    found = float(lib.sum_of_squares(_size(len(tensors)), _sizes(tensors), _addresses(tensors)))
    _check(found < 0.0)  # which no sum of squares is; one that is not finite is the caller's affair
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWStep:
    """One step's numbers: see optim.c."""

    rate: float
    shrink: float
    beta1: float
    beta2: float
    root: float
    eps: float
    factor: float


def adamw(
    lib: ctypes.CDLL,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    step: AdamWStep,
) -> None:
    """Updates fp32 parameters and both moments, fp32 too, in place."""
    sizes = _sizes(parameters)
    for group in (gradients, first, second):
        assert list(_sizes(group)) == list(sizes), "tensors of one parameter differ in size"
    lib.adamw(
        _size(len(parameters)), sizes, _addresses(parameters), _addresses(gradients),
        _addresses(first), _addresses(second), _adamw_numbers(step),
    )  # fmt: skip


def adamw_bf16(
    lib: ctypes.CDLL,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    keys: Sequence[int],
    step: AdamWStep,
) -> None:
    """The same with moments in bf16, rounded at random by a key a tensor."""
    sizes = _sizes(parameters)
    assert list(_sizes(gradients)) == list(sizes), "a gradient differs in size"
    for group in (first, second):
        found = _sizes(group, torch.bfloat16)
        assert list(found) == list(sizes), "tensors of one parameter differ in size"
    lib.adamw_bf16(
        _size(len(parameters)), sizes, _addresses(parameters), _addresses(gradients),
        _addresses(first), _addresses(second), (ctypes.c_uint32 * len(keys))(*keys),
        _adamw_numbers(step),
    )  # fmt: skip


def _adamw_numbers(step: AdamWStep) -> object:
    return ctypes.byref(
        _CAdamWStep(
            step.rate, step.shrink, step.beta1, step.beta2, step.root, step.eps, step.factor
        )
    )
