"""Labels as Python programs hold them, and the names that models know them by."""

from collections.abc import Iterable, Sequence
from typing import Any

from bertsmith.api.inputs import plain
from bertsmith.data.tables import BadRowError, label_name
from bertsmith.errors import UserError


def names_of(labels: Iterable[Any]) -> dict[str, Any]:
    """Each distinct label by the name that a table of it gives.

    Raises:
        UserError: A label is missing or no word or whole number, or two labels have one name.
    """
    found: dict[str, Any] = {}
    for row, label in enumerate(labels):
        try:
            name = label_name(label)
        except BadRowError as bad:
            raise UserError(f"labels, row {row}: {bad}") from None
        first = found.setdefault(name, label)
        if first != label:
            raise UserError(
                f"labels, row {row}: {label!r} and {first!r} are one label to the model; write "
                "them alike"
            )
    return found


def indicators(labels: Sequence[Any]) -> bool:
    """Whether labels are rows of 0 and 1, one column a label, rather than lists of labels."""
    rows = [row for row in labels if isinstance(row, list | tuple)]
    if len(rows) < len(labels) or len({len(row) for row in rows}) != 1 or not rows[0]:
        return False
    return len(rows[0]) > 1 and all(plain(cell) in (0, 1) for row in rows for cell in row)


def label_lists(labels: Sequence[Any], *, is_array: bool) -> list[list[Any]]:
    """The labels of each text; of an array of 0 and 1 the numbers of its columns, as words.

    Raises:
        UserError: A row is no list of labels, or no row of 0 and 1.
    """
    found: list[list[Any]] = []
    for number, row in enumerate(labels):
        if not isinstance(row, list | tuple | set | frozenset):
            raise UserError(
                f"labels, row {number}: is {row!r:.40}; give a list of labels, or 0 and 1 for each"
            )
        if is_array:
            found.append([str(i) for i, cell in enumerate(row) if plain(cell)])
        else:
            ordered = sorted(row, key=str) if isinstance(row, set | frozenset) else row
            found.append([plain(cell) for cell in ordered])
    return found
