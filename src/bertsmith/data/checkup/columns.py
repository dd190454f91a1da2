"""Columns beside the text that are not what a table needs, and text columns that are none."""

import math
import re
import shlex
from array import array
from collections.abc import Sequence

from bertsmith.data.checkup.findings import Finding, Severity, Source, shortened
from bertsmith.data.checkup.label_names import MISSING_WORDS

MOST_COLUMNS = 200
MOST_VALUES = 1000
"""Different values of a column that are remembered, to see whether they are the label's."""

MOST_LISTED = 8
"""Names of columns in a message."""

ONE_HOT_ROWS = 1000
FEWEST_ROWS = 10
"""Of so few rows nothing is said: all may be alike by chance."""

NUMBERED = re.compile(r"(\D{0,20})(\d{1,18})")
_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}


class ColumnCheck:
    """Follows the columns of a table that are neither text nor label."""

    def __init__(self, names: Sequence[str], *, used: set[int]) -> None:
        """Follow all columns but those used (positions of texts and label)."""
        others = [i for i in range(len(names)) if i not in used]
        self._columns = [_Column(names[i], i) for i in others[:MOST_COLUMNS]]
        self._bits: list[tuple[int | None, ...]] = []
        self._rows = 0

    def add(self, values: Sequence[object], label: str | None) -> None:
        """A row."""
        self._rows += 1
        if len(self._bits) < ONE_HOT_ROWS:
            self._bits.append(tuple(_bit(values[c.position]) for c in self._columns))
        for column in self._columns:
            column.add(values[column.position], label)

    def one_hot(self) -> tuple[list[str], bool]:
        """Names of columns that hold only 0 and 1, and whether each row has one 1 among them."""
        binary = [
            i
            for i in range(len(self._columns))
            if self._bits and all(row[i] is not None for row in self._bits)
        ]
        sums = [sum(row[i] or 0 for i in binary) for row in self._bits]
        return [self._columns[i].name for i in binary], bool(sums) and all(s == 1 for s in sums)

    def findings(self, source: Source, *, has_label: bool) -> list[Finding]:
        """What the columns are suspected of."""
        found: list[Finding] = []
        bits, is_one_hot = self.one_hot()
        if len(bits) >= 2 and self._rows >= FEWEST_ROWS and not has_label:
            found.append(
                _finding(
                    "one_hot_columns",
                    "error" if is_one_hot else "note",
                    f"columns hold 0 and 1 alone ({_listed(bits)})"
                    + (", and one 1 in each row: one class a row" if is_one_hot else ""),
                    bits,
                    self._columns,
                    source,
                    advice="Write one label column that names the class."
                    if is_one_hot
                    else "They are several labels a row: train with "
                    f"--table.label_columns {_as_option(bits)}.",
                )
            )
        if self._rows < FEWEST_ROWS:
            return found
        groups: dict[tuple[str, Severity, str, str], list[str]] = {}
        for column in self._columns:
            if (verdict := column.verdict(has_label=has_label)) is not None:
                groups.setdefault(verdict, []).append(column.name)
        for (check, severity, what, advice), names in groups.items():
            told = f"columns {what} ({_listed(names)})"
            found.append(
                _finding(check, severity, told, names, self._columns, source, advice=advice)
            )
        return found


class _Column:
    """One column: what can be told without keeping its values."""

    def __init__(self, name: str, position: int) -> None:
        self.name, self.position = name, position
        self._missing = self._rows = 0
        self._first: object = None
        self._is_constant = self._is_numbered = True
        self._last_number: tuple[str, int] | None = None
        self._direction = 0
        self._label_of: dict[str, str] | None = {}
        self._value_of: dict[str, str] = {}

    def add(self, value: object, label: str | None) -> None:
        self._rows += 1
        if is_missing(value):
            self._missing += 1
        if self._rows == 1:
            self._first = value
        elif self._is_constant and value != self._first:
            self._is_constant = False
        if self._is_numbered:
            self._is_numbered = self._follows(value)
        if self._label_of is not None and label is not None:
            word = str(value)
            same = self._label_of.setdefault(word, label) == label
            same = same and self._value_of.setdefault(label, word) == word
            if not same or len(self._label_of) > MOST_VALUES:
                self._label_of = None

    def _follows(self, value: object) -> bool:
        """Whether it is the number before plus some, with the same letters before it."""
        word = str(value) if isinstance(value, str | int) else ""
        match = NUMBERED.fullmatch(word.strip())
        if match is None:
            return False
        now = (match[1], int(match[2]))
        last, self._last_number = self._last_number, now
        if last is None:
            return True
        step = (now[1] > last[1]) - (now[1] < last[1])
        self._direction = self._direction or step
        return now[0] == last[0] and step != 0 and step == self._direction

    def verdict(self, *, has_label: bool) -> tuple[str, Severity, str, str] | None:
        """(check, severity, what, advice); None where nothing is odd."""
        if self._missing == self._rows:
            return (
                "empty_columns",
                "note",
                "hold only empty cells or words such as 'null' and 'nan'",
                "Leave them out of the file; nothing reads them.",
            )
        if self._is_constant:
            return (
                "constant_columns",
                "note",
                f"hold one value in every row: {shortened(str(self._first))}",
                "Leave them out of the file; they tell nothing.",
            )
        if self._is_numbered:
            return (
                "id_columns",
                "note",
                "number the rows",
                "They are not read; never name one as text or label.",
            )
        if has_label and self._label_of and len(self._label_of) > 1:
            return (
                "columns_that_tell_the_label",
                "note",
                "tell the label: each value goes with one label",
                "They are not read; as a text they would give the answer away.",
            )
        return None


class TextColumnCheck:
    """Whether the text is a text at all, or says its own label."""

    def __init__(self) -> None:
        self._rows = self._numbers = self._labels = self._saying = 0
        self._first: dict[str, int] = {}
        self._lines = array("q")

    def add(self, line: int, text: str, label: str | None) -> None:
        """A row that can be used."""
        self._rows += 1
        word = text.strip()
        if len(word) <= 24 and _is_number(word):
            self._numbers += 1
            self._first.setdefault("numbers", line)
        if label is not None:
            if word == label:
                self._labels += 1
                self._first.setdefault("labels", line)
            elif len(label) >= 4 and label in text:
                self._saying += 1
                self._first.setdefault("saying", line)

    def findings(self, source: Source, column: str, *, num_labels: int) -> list[Finding]:
        """What the text column is suspected of."""
        if self._rows < FEWEST_ROWS:
            return []
        kinds: list[tuple[str, int, float, str, str]] = [
            (
                "numbers",
                self._numbers,
                0.9,
                "text_is_a_number",
                f"rows have a number for a text (column {column!r})",
            ),
            (
                "labels",
                self._labels,
                0.5,
                "text_is_the_label",
                f"rows have their label for a text (column {column!r})",
            ),
            (
                "saying",
                self._saying if num_labels > 1 else 0,
                0.9,
                "label_in_text",
                f"rows have their label's name inside their text (column {column!r})",
            ),
        ]
        return [
            Finding(
                check=check,
                severity="warning" if key == "saying" else "error",
                what=what,
                count=count,
                total=self._rows,
                places=(source.at(self._first[key]),),
                advice="Name the right text column with --text_column."
                if key != "saying"
                else "If it was written there by a program, take it out: it gives the answer away.",
            )
            for key, count, share, check, what in kinds
            if count and count >= share * self._rows
        ]


def is_missing(value: object) -> bool:
    """Whether a cell is empty, or a word programs write for that."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and (not value.strip() or value.strip().lower() in MISSING_WORDS)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return word.lower().lstrip("+-") not in ("nan", "inf", "infinity")


def _bit(value: object) -> int | None:
    return _BITS.get(str(value).strip().lower())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(shortened(n) for n in names[:MOST_LISTED]) + (
        ", ..." if len(names) > MOST_LISTED else ""
    )


def _as_option(names: Sequence[str]) -> str:
    """As they are typed behind an option; the first few of many."""
    return shlex.join(names[:MOST_LISTED]) + (" ..." if len(names) > MOST_LISTED else "")


def _finding(
    check: str,
    severity: Severity,
    what: str,
    names: Sequence[str],
    columns: Sequence[_Column],
    source: Source,
    *,
    advice: str,
) -> Finding:
    return Finding(
        check=check,
        severity=severity,
        what=what,
        count=len(names),
        total=len(columns),
        places=(source.at(1),),
        advice=advice,
    )
