"""Labels: their names in a fixed order, their ids, and a held-out part that respects them."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.tables import LabelledTable, Table
from bertsmith.errors import UserError

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

FEW_ROWS = 20
"""Tables below this are too small to tell labels from free text by their number."""


def label_names(table: Table) -> tuple[str, ...]:
    """The distinct labels of a table: by value if all are numbers, else by code point.

    Raises:
        UserError: Fewer than two labels, or a label of its own for most rows (free text).
    """
    names = set(table.labels)
    if len(names) == 1:
        raise UserError(
            f"{table.path}: every row has the label {table.labels[0]!r}; "
            "a classifier needs at least two"
        )
    numbers = [_number(name) for name in names]
    if all(n is not None for n in numbers):
        return in_order(names)
    if len(table) >= FEW_ROWS and len(names) > len(table) // 2:
        raise UserError(
            f"{table.path}: {len(names):,} different labels in {len(table):,} rows; is this the "
            "label column? Say --table.label_column"
        )
    return in_order(names)


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Names by value if all are numbers, else by code point."""
    if all(_number(name) is not None for name in names):
        return tuple(sorted(names, key=lambda n: (float(n), n)))
    return tuple(sorted(names))


def label_ids(table: Table, names: Sequence[str], *, known_from: str) -> Tensor:
    """The id of each row's label: its place in `names`, int64.

    Args:
        table: A table to judge or to train by.
        names: The model's labels.
        known_from: Where the names come from, for the message.

    Raises:
        UserError: A label that is not among the names, with its place.
    """
    ids = {name: i for i, name in enumerate(names)}
    unknown = [i for i, name in enumerate(table.labels) if name not in ids]
    if unknown:
        raise unknown_label(
            table, unknown, table.labels[unknown[0]], names=names, known_from=known_from
        )
    return torch.tensor([ids[name] for name in table.labels])


def unknown_label(
    table: LabelledTable[Any], rows: list[int], label: str, *, names: Sequence[str], known_from: str
) -> UserError:
    """What to say of rows with a label that is not among the names.

    Args:
        table: Where they stand.
        rows: All of them.
        label: The first one's.
        names: The model's labels.
        known_from: Where the names come from.
    """
    count = f" (and {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
    shown = ", ".join(repr(n) for n in names[:10]) + (", ..." if len(names) > 10 else "")
    return UserError(
        f"{table.place(rows[0])}{count}: the label {label!r} does not "
        f"occur in {known_from}, whose {len(names)} labels are {shown}"
    )


def stratified_holdout(
    labels: Sequence[str], *, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Split rows into (training, held out), each label in proportion, in the table's order.

    Each label gives its share, rounded so that the whole is exact (largest remainder), and
    always keeps at least one row for training. A pure function of its arguments.

    Raises:
        UserError: So few rows that none can be held out.
    """
    rows_of: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    names = sorted(rows_of)
    wanted = {n: share * len(rows_of[n]) for n in names}
    taken = {n: int(wanted[n]) for n in names}
    total = max(1, round(share * len(labels)))
    for name in sorted(names, key=lambda n: (taken[n] - wanted[n], n)):
        if sum(taken.values()) >= total:
            break
        if taken[name] < len(rows_of[name]) - 1:
            taken[name] += 1
    held_out: set[int] = set()
    generator = np.random.Generator(np.random.PCG64(seed))
    for name in names:
        order = generator.permutation(len(rows_of[name]))
        held_out.update(rows_of[name][i] for i in order[: taken[name]])
    if not held_out:
        raise UserError(
            "no row can be held out to judge by: every label has a single row; "
            "give more rows, or a table with --eval"
        )
    return [i for i in range(len(labels)) if i not in held_out], sorted(held_out)


def _number(name: str) -> float | None:
    return float(name) if NUMBER.fullmatch(name) else None
