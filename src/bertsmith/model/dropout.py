"""Dropout whose randomness is an argument: a pure function of (seed, site), never of global state.

Whether an element survives is a hash of (key, row, column): every body that computes a dropout,
on any device and in any order, keeps the same elements, and none needs a mask in memory. The same
hash stands in kernels/common.h. Row mixer: splitmix64 (Steele, Lea, Flood 2014).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """One dropout of one pass: what is dropped, and how the rest is scaled."""

    key: int
    """64 bits that name the pass's seed and the site."""

    threshold: int
    """An element goes when its 32 bits are below: chance times 2^32. 0 drops nothing."""

    scale: float
    """1 / (1 - chance), what survivors are multiplied with."""


NO_DROPOUT = Dropout(key=0, threshold=0, scale=1.0)


def dropout_at(*, drop_prob: float, seed: int | None, site: int, first_row: int = 0) -> Dropout:
    """The dropout of a site: `NO_DROPOUT` for a None seed or chance 0.

    Rows are numbered through a whole training step: a pack that begins at row 5,000 of its step
    loses what rows 5,000 and up lose, however the step is cut into packs.

    Args:
        drop_prob: Chance that an element is dropped, in [0, 1).
        seed: The pack's dropout seed, any integer; None means inference.
        site: Which dropout of the model this is; sites draw independent bits.
        first_row: Number in its step of the row that `keep_of` calls 0.
    """
    if seed is None or drop_prob == 0.0:
        return NO_DROPOUT
    return Dropout(
        # The hash of a row starts at key + (row + 1) * golden, so an offset of rows is one of keys.
        key=(_split_mix(_split_mix(seed & _MASK64) ^ site) + first_row * _GOLDEN) & _MASK64,
        threshold=min(round(drop_prob * (1 << 32)), _MASK32),
        scale=1.0 / (1.0 - drop_prob),
    )


def keep_of(drop: Dropout, rows: Tensor, columns: Tensor) -> Tensor:
    """Which elements survive, as bools, for int64 row and column numbers that broadcast.

    Rows may be any non-negative integer, columns are below 2^32.
    """
    mixed = (rows + 1) * _signed(_GOLDEN) + _signed(drop.key)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shift(mixed, 31)
    first, second = mixed & _MASK32, _shift(mixed, 32)
    bits = ((columns ^ first) * 0x7FEB352D) & _MASK32
    bits = (((bits ^ (bits >> 15)) + second) & _MASK32) * 0x846CA68B & _MASK32
    return (bits ^ (bits >> 16)) >= drop.threshold


def apply_dropout(hidden: Tensor, drop: Dropout, rows_M: Tensor | None = None) -> Tensor:
    """Zero what (rows, columns) lose by `drop`, and scale the rest.

    Args:
        hidden: Shape (M, D).
        drop: What is lost.
        rows_M: The number of each row, int64; None: from 0.
    """
    if drop.threshold == 0:
        return hidden
    if rows_M is None:
        rows_M = torch.arange(hidden.shape[0], device=hidden.device)
    columns = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden * keep_of(drop, rows_M[:, None], columns) * drop.scale


def _split_mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, by: int) -> Tensor:
    """Logical shift right of int64, which torch would shift by sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)
