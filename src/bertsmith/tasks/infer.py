"""Which kind of task a table is for, and why: said aloud, and settable with `--task`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.data.config import TableConfig
from bertsmith.data.label_sets import find_separator
from bertsmith.data.labels import FEW_ROWS
from bertsmith.data.scores import as_number
from bertsmith.data.tables import LabelledTable, is_missing, json_list
from bertsmith.errors import UserError
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.config import TaskName
from bertsmith.tasks.kind import TaskKind
from bertsmith.tasks.multilabel import Multilabel
from bertsmith.tasks.regression import Regression

NUMBERS_SHARE = 0.9
"""Of the labels, how many must be numbers for the others to be faults among scores."""


@dataclass(frozen=True, kw_only=True)
class ChosenTask:
    """A kind and how it came to be chosen."""

    kind: TaskKind[Any]
    said: str
    """A line for people."""


def choose_task(asked: TaskName, table: LabelledTable[object], config: TableConfig) -> ChosenTask:
    """The kind that is asked for, or that the labels of the training table show.

    Args:
        asked: By the user.
        table: Labels as they stand there.
        config: Says where labels are and what separates them.

    Raises:
        UserError: What is asked for does not go with the columns.
    """
    has_columns = bool(table.columns.labels)
    if has_columns and asked not in ("auto", "multilabel"):
        raise UserError(
            f"--table.label_columns: are for --task multilabel, not {asked}; name one column with "
            "--table.label_column"
        )
    words = [cell for cell in table.labels if isinstance(cell, str) and cell.strip()]
    separator = config.label_separator
    if separator is None and not has_columns and asked in ("auto", "multilabel"):
        lists = any(isinstance(c, list) for c in table.labels) or any(
            json_list(word) is not None for word in words
        )
        separator = None if lists else find_separator(words)
    if asked == "auto":
        kind, why = _inferred(table, config, words, separator)
        said = f"task: {kind.name}, because {why}; --task sets another"
    else:
        kind, said = _of_name(asked, separator), f"task: {asked}, as --task says"
        why = ""
    if isinstance(kind, Multilabel) and separator is not None and repr(separator) not in said:
        said += f"; labels are separated by {separator!r} (--table.label_separator)"
    return ChosenTask(kind=kind, said=said)


def _of_name(name: TaskName, separator: str | None) -> TaskKind[Any]:
    match name:
        case "multilabel":
            return Multilabel(separator)
        case "regression":
            return Regression()
        case _:
            return Classification()


def _inferred(
    table: LabelledTable[object], config: TableConfig, words: list[str], separator: str | None
) -> tuple[TaskKind[Any], str]:
    """A kind and the reason for it."""
    if table.columns.labels:
        return Multilabel(), f"{len(table.columns.labels)} columns hold a label each"
    cells = [cell for cell in table.labels if not is_missing(cell)]
    first_list = next((i for i, c in enumerate(table.labels) if isinstance(c, list)), None)
    if first_list is not None:
        return Multilabel(), f"the label of {table.place(first_list)} is a list"
    if words and len(words) == len(cells) and all(json_list(word) is not None for word in words):
        return Multilabel(), "the labels are lists in JSON"
    if separator is not None:
        combined = next((word for word in words if separator in word), "")
        shown = repr(combined if len(combined) <= 60 else combined[:57] + "...")
        what = f"labels such as {shown} are several, separated by {separator!r}"
        if config.label_separator is not None:
            what = f"--table.label_separator is {separator!r}"
        return Multilabel(separator), what
    return _of_single_cells(table, cells)


def _of_single_cells(
    table: LabelledTable[object], cells: Sequence[object]
) -> tuple[TaskKind[Any], str]:
    numbers = [number for cell in cells if (number := as_number(cell)) is not None]
    distinct = len(set(map(str, cells)))
    if len(numbers) >= NUMBERS_SHARE * len(cells) and numbers:
        broken = next(
            (
                i
                for i, cell in enumerate(table.labels)
                if (n := as_number(cell)) is not None and not n.is_integer()
            ),
            None,
        )
        if broken is not None:
            shown = str(table.labels[broken]).strip()
            return Regression(), (
                f"the label {shown} of {table.place(broken)} is no whole number (were they names "
                "of classes: --task classification)"
            )
        if len(numbers) == len(cells) >= FEW_ROWS and len(set(numbers)) > len(cells) // 2:
            return Regression(), (
                f"the labels are {len(set(numbers)):,} different numbers in {len(cells):,} rows"
            )
        if any(isinstance(cell, float) or "." in str(cell) for cell in cells):
            return Classification(), (
                f"the labels are {len(set(numbers))} whole numbers, though written with a point "
                "(were they scores: --task regression)"
            )
        return Classification(), f"the labels are {distinct:,} whole numbers"
    return Classification(), f"the labels are {distinct:,} different words"
