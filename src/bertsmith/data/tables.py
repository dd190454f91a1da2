"""Labelled tables: rows of one or two texts, with a label where one is wanted.

Every row is either used or accounted for: a row that cannot be used stops the reading with its
place, or is skipped and counted (`bad_rows`).
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Self, TypeVar, cast

from bertsmith.data.columns import Columns, UsualColumns, find_columns
from bertsmith.data.config import TableConfig
from bertsmith.data.table_files import Record, open_records
from bertsmith.errors import UserError

LabelT = TypeVar("LabelT")
ReadT = TypeVar("ReadT")

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""What JSON can write and UTF-8 cannot: no tokenizer takes it."""

SKIP_HINT = (
    "correct it, or leave such rows out with --table.bad_rows skip; bertsmith doctor lists them all"
)
"""How a message about a row ends."""


class BadRowError(Exception):
    """A row that cannot be used, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One usable row."""

    row: int
    """Data row, from 1; a header line is not counted."""

    line: int | None
    """Line of the file, from 1; None in Parquet."""

    text: str
    """The text, as it stands in the file."""

    pair: str | None
    """The second text, in a table of pairs."""

    label: str | None
    """The label's name, where labels are read."""

    values: tuple[object, ...]
    """Every value of the row, in the table's columns."""

    cell: object = None
    """What stands in the label's column, where labels are left as they are; of several columns a
    tuple."""


class TableReader:
    """The usable rows of a table, once, in order; counts what it skips."""

    def __init__(
        self,
        path: Path,
        config: TableConfig,
        *,
        is_labelled: bool,
        is_pair: bool | None = None,
        usual: UsualColumns | None = None,
        keeps_columns: bool = False,
        takes_lines: bool = False,
        reads_labels: bool = True,
    ) -> None:
        """Open a table and find its columns.

        Args:
            path: The file.
            config: Columns, quoting, what to do with bad rows.
            is_labelled: Whether each row needs a label.
            is_pair: Whether each row needs a second text; None: as the table's columns say.
            usual: Columns to look for first, where the config names none.
            keeps_columns: Whether the values of all columns are carried on; a JSON key that first
                comes too late to be a column is an error then.
            takes_lines: Whether a .txt file or standard input (`-`) will do, a text a line.
            reads_labels: Whether labels are read as names of one class; else they are left as they
                are.

        Raises:
            UserError: The file cannot be read, or its columns do not fit.
        """
        self.path = path
        self.skipped_rows = 0
        self.first_skipped: str | None = None
        self._config = config
        self._keeps_columns, self._reads_labels = keeps_columns, reads_labels
        names = None if config.columns is None else tuple(config.columns)
        self._records = open_records(
            path, quoting=config.quoting, columns=names, takes_lines=takes_lines
        )
        try:
            self.columns: Columns = find_columns(
                self._records.columns,
                path=path,
                config=config,
                is_labelled=is_labelled,
                is_pair=is_pair,
                usual=usual,
            )
            if keeps_columns and (broken := next(filter(_is_broken, self.columns.names), None)):
                raise UserError(
                    f"{path}: the name of column {broken!r} holds half a surrogate pair; rename it"
                )
        except UserError:
            self._records.close()
            raise

    def __enter__(self) -> Self:
        """The reader itself; leaving closes the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._records.close()

    def __iter__(self) -> Iterator[Row]:
        """Rows that can be used.

        Raises:
            UserError: The first row that cannot, unless bad rows are skipped.
        """
        columns = self.columns
        for record in self._records.rows:
            try:
                yield self._row(record, columns)
            except BadRowError as bad:
                message = f"{place_of(self.path, record.row, record.line)}: {bad}"
                if self._config.bad_rows == "error":
                    raise UserError(f"{message}; {SKIP_HINT}") from None
                self.skipped_rows += 1
                self.first_skipped = self.first_skipped or message

    def _row(self, record: Record, columns: Columns) -> Row:
        if record.fault is not None:
            raise BadRowError(record.fault)
        if self._keeps_columns and record.late_key is not None:
            raise BadRowError(f"the key {record.late_key!r} stands in none of the first rows")
        if self._keeps_columns:
            for name, value in zip(columns.names, record.values, strict=True):
                if _is_broken(value):
                    raise BadRowError(f"the value holds half a surrogate pair (column {name!r})")
        pair, label = columns.pair, columns.label
        cell = (
            tuple(record.values[i] for i in columns.labels)
            if columns.labels
            else None
            if label is None
            else record.values[label]
        )
        return Row(
            row=record.row,
            line=record.line,
            text=_text(record.values[columns.text], columns.text_name),
            pair=None if pair is None else _text(record.values[pair], columns.names[pair]),
            label=label_name(cell, columns.names[label])
            if label is not None and self._reads_labels
            else None,
            values=record.values if self._keeps_columns else (),
            cell=None if self._reads_labels else cell,
        )


@dataclass(frozen=True, kw_only=True)
class LabelledTable(Generic[LabelT]):
    """A whole labelled table in memory, column by column."""

    path: Path
    columns: Columns
    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: tuple[LabelT, ...]
    """What each example is to be told: a name, a number, several names, or as it stands there."""

    rows: tuple[int, ...]
    """Data row of each example."""

    lines: tuple[int | None, ...]
    """Line of each example."""

    skipped_rows: int
    """Rows that could not be used."""

    first_skipped: str | None
    """What was wrong with the first of them, and where."""

    def __len__(self) -> int:
        """Examples."""
        return len(self.texts)

    def place(self, index: int) -> str:
        """Where an example stands in the file."""
        return place_of(self.path, self.rows[index], self.lines[index])

    def select(self, indices: list[int]) -> "LabelledTable[LabelT]":
        """Some of the examples."""
        return replace(
            self,
            texts=tuple(self.texts[i] for i in indices),
            pairs=None if self.pairs is None else tuple(self.pairs[i] for i in indices),
            labels=tuple(self.labels[i] for i in indices),
            rows=tuple(self.rows[i] for i in indices),
            lines=tuple(self.lines[i] for i in indices),
        )

    def read_labels(
        self, read: Callable[[object], ReadT], config: TableConfig
    ) -> "LabelledTable[ReadT]":
        """The same table with its labels read.

        Args:
            read: From what stands there; raises `BadRowError` where it cannot be used.
            config: Says what then becomes of the row.

        Raises:
            UserError: A label cannot be used, or no row is left.
        """
        labels: list[ReadT] = []
        kept: list[int] = []
        first_skipped = self.first_skipped
        for index, cell in enumerate(self.labels):
            try:
                labels.append(read(cell))
                kept.append(index)
            except BadRowError as bad:
                message = f"{self.place(index)}: {bad}"
                if config.bad_rows == "error":
                    raise UserError(f"{message}; {SKIP_HINT}") from None
                first_skipped = first_skipped or message
        num_skipped = self.skipped_rows + len(self) - len(kept)
        if not kept:
            raise _no_rows(self.path, num_skipped)
        some = self if len(kept) == len(self) else self.select(kept)
        return replace(
            cast("LabelledTable[ReadT]", some),
            labels=tuple(labels),
            skipped_rows=num_skipped,
            first_skipped=first_skipped,
        )


Table = LabelledTable[str]
"""A table for one class a text."""


def read_table(
    path: Path,
    config: TableConfig,
    *,
    is_pair: bool | None = None,
    usual: UsualColumns | None = None,
) -> Table:
    """Read a table of one class a text wholly; the arguments are those of `TableReader`.

    Raises:
        UserError: It cannot be read, a row cannot be used, or no usable row is there.
    """
    table = read_cells(path, config, is_pair=is_pair, usual=usual)
    return table.read_labels(lambda cell: label_name(cell, table.columns.label_name), config)


def read_cells(
    path: Path,
    config: TableConfig,
    *,
    is_pair: bool | None = None,
    usual: UsualColumns | None = None,
    is_labelled: bool = True,
) -> LabelledTable[object]:
    """Read a labelled table wholly, its labels as they stand there; otherwise as `read_table`."""
    with TableReader(
        path, config, is_labelled=is_labelled, is_pair=is_pair, usual=usual, reads_labels=False
    ) as reader:
        rows = list(reader)
    if not rows:
        raise _no_rows(path, reader.skipped_rows)
    has_pairs = reader.columns.pair is not None
    return LabelledTable[object](
        path=path,
        columns=reader.columns,
        texts=tuple(r.text for r in rows),
        pairs=tuple(r.pair or "" for r in rows) if has_pairs else None,
        labels=tuple(r.cell for r in rows),
        rows=tuple(r.row for r in rows),
        lines=tuple(r.line for r in rows),
        skipped_rows=reader.skipped_rows,
        first_skipped=reader.first_skipped,
    )


def _no_rows(path: Path, num_skipped: int) -> UserError:
    skipped = f" ({num_skipped} were skipped)" if num_skipped else ""
    return UserError(f"{path}: the table has no rows to use{skipped}")


def place_of(path: Path, row: int, line: int | None) -> str:
    """`file:line (row n)`, the way every message names a row."""
    name = "standard input" if str(path) == "-" else str(path)
    return f"{name}, row {row}" if line is None else f"{name}:{line} (row {row})"


def json_list(text: str) -> list[object] | None:
    """The list that a text writes in JSON; None if it writes none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def label_name(value: object, column: str = "label") -> str:
    """One name for a label, however its file writes it: 1, 1.0, "1" and "1.0" are all "1".

    A data frame writes integers as 1.0 once one of them is missing, so the two must meet. Blanks
    around a label are no part of it; true and false are words.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float() if math.isnan(value):
            raise BadRowError(f"the label is missing (column {column!r})")
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case None:
            raise BadRowError(f"the label is missing (column {column!r})")
        case str():
            return _label_word(value, column)
        case list():
            raise BadRowError(
                f"the label is a list (column {column!r}); several labels a text are learned with "
                "--task multilabel"
            )
        case _:
            raise BadRowError(
                f"the label is a {type(value).__name__} (column {column!r}); "
                "it must be a word or a whole number"
            )


def is_missing(cell: object) -> bool:
    """Whether a cell of a label holds nothing: no value, NaN, or blanks."""
    match cell:
        case None:
            return True
        case float():
            return math.isnan(cell)
        case str():
            return not cell.strip()
        case _:
            return False


def _label_word(value: str, column: str) -> str:
    name = value.strip()
    if not name:
        raise BadRowError(f"the label is empty (column {column!r})")
    if _is_broken(name):
        raise BadRowError(f"the label holds half a surrogate pair (column {column!r})")
    whole, dot, zeros = name.partition(".")
    if dot and zeros and not zeros.strip("0") and whole.removeprefix("-").isdecimal():
        return whole
    return name


def _is_broken(value: object) -> bool:
    """Whether half a surrogate pair stands in a value, or somewhere inside it."""
    match value:
        case str():
            return not value.isascii() and LONE_SURROGATE.search(value) is not None
        case list():
            return any(_is_broken(inner) for inner in value)
        case dict():
            return any(_is_broken(inner) for item in value.items() for inner in item)
        case _:
            return False


def _text(value: object, column: str) -> str:
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"the text is empty (column {column!r})")
        if _is_broken(value):
            raise BadRowError(f"the text holds half a surrogate pair (column {column!r})")
        return value
    if value is None:
        raise BadRowError(f"the text is missing (column {column!r})")
    raise BadRowError(f"the text is a {type(value).__name__}, not a string (column {column!r})")
