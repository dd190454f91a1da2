"""Any number of labels a text: lists in one column, or a column of 0 and 1 for each label.

Shape legend: N examples, C labels.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from bertsmith.data.labels import in_order, stratified_holdout, unknown_label
from bertsmith.data.tables import BadRowError, LabelledTable, json_list, label_name
from bertsmith.errors import UserError

LabelSet = tuple[str, ...]
"""The labels of one text, each once, in the order they stand there; may be empty."""

SEPARATORS = ("|", ";", ",")
"""Signs between labels that are found without being said, in the order they are looked for."""

KNOWN_SHARE = 0.9
"""Of the cells with such a sign, how many must be made of labels that occur elsewhere too."""

YES = ("1", "true", "yes")
NO = ("0", "false", "no")


def read_label_list(cell: object, column: str, *, separator: str | None) -> LabelSet:
    """The labels in one cell: a list, a list as JSON, or names with a separator between them.

    An empty text or list is a text without labels.

    Raises:
        BadRowError: It is none of this, a name is empty, or one stands twice.
    """
    items: Sequence[object]
    match cell:
        case None:
            raise BadRowError(
                f"the labels are missing (column {column!r}); write [] for a text without labels"
            )
        case list():
            items = cell
        case str():
            listed = json_list(cell)
            if listed is not None:
                items = listed
            elif not cell.strip():
                items = []
            else:
                items = cell.split(separator) if separator else [cell]
        case _:
            items = [cell]
    names = tuple(label_name(item, column) for item in items)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRowError(
            f"the label {twice!r} stands twice in a list (column {column!r}); a row of 0 and 1 "
            "cannot say which labels it means: write names, or a column a label "
            "(--table.label_columns)"
        )
    return names


def read_label_columns(cells: object, names: Sequence[str]) -> LabelSet:
    """The labels whose columns hold 1.

    Raises:
        BadRowError: A column holds something else than 0 and 1.
    """
    assert isinstance(cells, tuple)
    return tuple(
        name for name, cell in zip(names, cells, strict=True) if _is_there(cell, column=name)
    )


def _is_there(cell: object, *, column: str) -> bool:
    text = label_name(cell, column).lower()
    if text in YES or text in NO:
        return text in YES
    raise BadRowError(f"{cell!r} is neither 0 nor 1 (column {column!r})")


def find_separator(cells: Sequence[str], *, known: Sequence[str] = ()) -> str | None:
    """The sign between labels that a column shows; None if no sign is sure to be one.

    It is sure if nearly all cells that have it are made of names which stand alone elsewhere, or in
    another combination, or are known.
    """
    distinct = Counter(cell.strip() for cell in cells if cell.strip())
    for separator in SEPARATORS:
        combined = {
            cell: [part.strip() for part in cell.split(separator)]
            for cell in distinct
            if separator in cell and cell not in known
        }
        if not combined:
            continue
        alone = (set(distinct) - set(combined)) | set(known)
        times = Counter(part for parts in combined.values() for part in set(parts))
        good = sum(
            count
            for cell, count in distinct.items()
            if cell in combined
            and all(part and (part in alone or times[part] > 1) for part in combined[cell])
        )
        total = sum(count for cell, count in distinct.items() if cell in combined)
        if alone & set(times) and good >= KNOWN_SHARE * total:
            return separator
    return None


def set_names(table: LabelledTable[LabelSet]) -> tuple[str, ...]:
    """The distinct labels of a table, in the order of classes.

    Raises:
        UserError: No row has any, or all have the same.
    """
    names = {name for labels in table.labels for name in labels}
    if not names:
        raise UserError(f"{table.path}: no row has a label (--table.label_column names the column)")
    if len(names) == 1 and all(table.labels):
        raise UserError(
            f"{table.path}: every row has the one label {next(iter(names))!r}; there is nothing to "
            "learn"
        )
    return in_order(names)


def multi_hot(table: LabelledTable[LabelSet], names: Sequence[str], *, known_from: str) -> Tensor:
    """1 where a row has a label, else 0, fp32, shape N x C.

    Args:
        table: A table to judge or to train by.
        names: The model's labels.
        known_from: Where the names come from, for the message.

    Raises:
        UserError: A label that is not among the names, with its place.
    """
    ids = {name: i for i, name in enumerate(names)}
    unknown = [i for i, labels in enumerate(table.labels) if not set(labels) <= set(ids)]
    if unknown:
        label = next(name for name in table.labels[unknown[0]] if name not in ids)
        raise unknown_label(table, unknown, label, names=names, known_from=known_from)
    targets_NC = torch.zeros(len(table), len(names))
    for row, labels in enumerate(table.labels):
        for name in labels:
            targets_NC[row, ids[name]] = 1.0
    return targets_NC


def label_set_holdout(
    sets: Sequence[LabelSet], *, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Split rows into (training, held out), each label about in proportion.

    Each row counts for its rarest label, those without any for none: so a rare label is dealt out
    by itself, and keeps a row in training.

    Raises:
        UserError: As `stratified_holdout`.
    """
    times = Counter(name for labels in sets for name in labels)
    rarest = [min(labels, key=lambda n: (times[n], n), default="") for labels in sets]
    return stratified_holdout(rarest, share=share, seed=seed)
