"""Texts and labels as Python programs hold them, as plain lists, checked.

Lists, numpy arrays, columns and tables of pandas, polars or Arrow are told apart by what they can
do, so that none of these has to be installed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.data.columns import UsualColumns, find_columns
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import LONE_SURROGATE
from bertsmith.errors import UserError

TEXT, PAIR, LABEL = "text", "text_b", "label"
"""Columns of what came without names."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was handed over, row by row."""

    columns: UsualColumns
    """Names of the columns it had, or gets."""

    texts: list[str]
    pairs: list[str] | None
    """Second texts, where there are pairs."""

    labels: list[Any] | None
    """Labels as they were given, numpy's scalars as Python's; None where there are none."""

    def rows(self) -> Iterable[dict[str, object]]:
        """A table of it, a mapping a row."""
        for i, text in enumerate(self.texts):
            row: dict[str, object] = {self.columns.text: text}
            if self.pairs is not None and self.columns.pair is not None:
                row[self.columns.pair] = self.pairs[i]
            if self.labels is not None:
                row[self.columns.label] = self.labels[i]
            yield row


def read_given(
    X: Any,
    y: Any = None,
    *,
    table: TableConfig,
    is_labelled: bool,
    is_pair: bool | None = None,
    usual: UsualColumns | None = None,
) -> Given:
    """Read texts, and labels where they are wanted.

    Args:
        X: Texts, pairs of texts as tuples, or a table with named columns.
        y: Labels; None where a table's column has them.
        table: Names of columns, where the user gave them.
        is_labelled: Whether there have to be labels.
        is_pair: Whether there have to be pairs; None: as it comes.
        usual: Columns that a model was trained on.

    Raises:
        UserError: Something is missing, has the wrong form, or does not go together.
    """
    names = column_names(X)
    if names is None:
        cells = as_list(X, what="texts")
        columns = UsualColumns(text=TEXT, pair=PAIR, label=LABEL)
        firsts, seconds = _split_pairs(cells)
        if is_labelled and y is None:
            raise UserError("fit: labels are missing; give fit(texts, labels), or a table")
    else:
        try:
            found = find_columns(
                names,
                path=Path("the table"),
                config=table,
                is_labelled=is_labelled and y is None,
                is_pair=is_pair,
                usual=usual,
            )
        except UserError as error:  # parameters here have the names of the options
            raise UserError(str(error).replace("--table.", "")) from error
        columns = UsualColumns(
            text=found.text_name,
            pair=found.pair_name,
            label=LABEL if found.label is None else found.label_name,
        )
        if columns.label in (columns.text, columns.pair):
            raise UserError(f"the column {columns.label!r} holds texts; rename it")
        firsts = as_list(X[columns.text], what=columns.text)
        seconds = None if columns.pair is None else as_list(X[columns.pair], what=columns.pair)
        if is_labelled and y is None:
            y = X[columns.label]
    if is_pair is not None and is_pair != (seconds is not None):
        raise UserError(
            "the model reads pairs: give tuples of two texts"
            if is_pair
            else "the model reads single texts, and these are pairs"
        )
    texts = [_text(cell, i) for i, cell in enumerate(firsts)]
    pairs = None if seconds is None else [_text(cell, i) for i, cell in enumerate(seconds)]
    labels = as_list(y, what="labels") if is_labelled else None
    if labels is not None and len(labels) != len(texts):
        raise UserError(
            f"there are {len(texts):,} texts and {len(labels):,} labels; give a label a text"
        )
    if is_labelled and not texts:
        raise UserError("there are no texts")
    columns = UsualColumns(
        text=columns.text, pair=None if pairs is None else columns.pair, label=columns.label
    )
    return Given(columns=columns, texts=texts, pairs=pairs, labels=labels)


def column_names(X: Any) -> tuple[str, ...] | None:
    """Names of a table's columns; None of what is no table."""
    if isinstance(X, Mapping):
        return tuple(map(str, X))
    for attribute in ("column_names", "columns"):  # Arrow and datasets; pandas and polars
        names = getattr(X, attribute, None)
        if names is not None and not callable(names):
            return tuple(str(name) for name in names)
    return None


def as_list(values: Any, *, what: str) -> list[Any]:
    """A plain list of what a column, an array or any other collection holds.

    Raises:
        UserError: It is one text, or no collection.
    """
    if isinstance(values, str | bytes):
        raise UserError(f"{what}: is one text; give a list of them")
    for method in ("to_pylist", "to_list", "tolist"):  # Arrow; pandas and polars; numpy
        listed = getattr(values, method, None)
        if callable(listed):
            found = listed()
            break
    else:
        if not isinstance(values, Iterable):
            raise UserError(f"{what}: is a {type(values).__name__}; give a list")
        found = list(values)
    if not isinstance(found, list):
        raise UserError(f"{what}: is a single value; give a list")
    return [plain(value) for value in found]


def plain(value: Any) -> Any:
    """Numpy's scalars as Python's own."""
    if isinstance(value, str | int | float | bool | None):
        # numpy.str_ and numpy.float64 are these too, and JSON and the tables want the plain ones.
        for kind in (bool, str, int, float):
            if isinstance(value, kind):
                return kind(value)
        return value
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def plain_tree(value: Any) -> Any:
    """Lists and mappings of plain values, of whatever arrays hold them; NaN is None.

    Tables have NaN where nothing is.

    Raises:
        UserError: It holds itself, or is nested too deep.
    """
    try:
        return _plain_tree(value)
    except RecursionError:
        raise UserError("a value is nested too deep, or holds itself") from None


def _plain_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_tree(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):  # numpy
        return _plain_tree(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain_tree(inner) for inner in value]
    return value


def check_whole(text: str, *, where: str) -> None:
    """Refuse a text with half of a character in it, which no tokenizer takes.

    Raises:
        UserError: It has one.
    """
    if LONE_SURROGATE.search(text):
        raise UserError(f"{where}: holds half a surrogate pair; leave such rows out")


def _split_pairs(cells: list[Any]) -> tuple[list[Any], list[Any] | None]:
    """Texts, and second texts if the first cell is a pair."""
    if not cells or not _is_pair(cells[0]):
        return cells, None
    for i, cell in enumerate(cells):
        if not _is_pair(cell):
            raise UserError(f"texts, row {i}: is no pair of two texts, and row 0 is one")
    return [a for a, _ in cells], [b for _, b in cells]


def _is_pair(cell: Any) -> bool:
    return isinstance(cell, tuple | list) and len(cell) == 2


def _text(cell: Any, row: int) -> str:
    if isinstance(cell, str):
        if not cell.strip():
            raise UserError(f"texts, row {row}: is empty; leave such rows out")
        check_whole(cell, where=f"texts, row {row}")
        return cell
    raise UserError(
        f"texts, row {row}: is {cell!r:.40} ({type(cell).__name__}), not a text; leave such rows "
        "out"
    )
