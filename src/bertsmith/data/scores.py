"""Scores: numbers that regression learns, and a held-out part of a table without classes."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from bertsmith.data.labels import NUMBER
from bertsmith.data.tables import BadRowError, LabelledTable, is_missing
from bertsmith.errors import UserError

HASH_BYTES = 8


def read_score(cell: object, column: str) -> float:
    """A finite number from what stands in a table: 0.5, "0.5", "1e-3".

    Raises:
        BadRowError: It is none.
    """
    if is_missing(cell):
        raise BadRowError(f"the score is missing (column {column!r})")
    number = as_number(cell)
    if number is None:
        shown = repr(cell if not isinstance(cell, str) or len(cell) <= 40 else cell[:37] + "...")
        raise BadRowError(
            f"{shown} is no number (column {column!r}); regression learns numbers (--task "
            "classification learns words)"
        )
    if not math.isfinite(number):
        raise BadRowError(f"the score {cell!r} is not finite (column {column!r})")
    if abs(number) > torch.finfo(torch.float32).max:
        raise BadRowError(f"the score {cell!r} is more than fp32 holds (column {column!r})")
    return number


def as_number(cell: object) -> float | None:
    """A cell as a number, where it is one; infinity is."""
    match cell:
        case bool():
            return None
        case int() | float():
            return float(cell) if abs(cell) <= 1e300 else math.inf
        case str() if NUMBER.fullmatch(cell.strip()):
            return float(cell)
        case _:
            return None


def scores_of(table: LabelledTable[float]) -> Tensor:
    """Every row's score, fp32."""
    return torch.tensor(table.labels, dtype=torch.float32)


def hashed_holdout(
    table: LabelledTable[Any], *, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Split rows into (training, held out) by a hash of what they say, in the table's order.

    Rows with the same text lie on the same side but for one text at the border; other rows of the
    table move few. A pure function of its arguments.

    Raises:
        UserError: A single row.
    """
    if len(table) < 2:
        raise UserError(
            f"{table.path}: no row can be held out to judge by: there is a single one; give more "
            "rows, or a table with --eval"
        )
    pairs = table.pairs or [""] * len(table)

    def key(row: int) -> bytes:
        content = f"{seed}/{len(table.texts[row])}/{table.texts[row]}{pairs[row]}"
        return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).digest()

    num_held_out = min(max(1, round(share * len(table))), len(table) - 1)
    held_out = set(sorted(range(len(table)), key=lambda row: (key(row), row))[:num_held_out])
    return [i for i in range(len(table)) if i not in held_out], sorted(held_out)
