"""The texts of a table's rows: those that stop a training, and those that should."""

from collections.abc import Callable, Sequence

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.characters import HALF_CHARACTER, CharacterCheck
from bertsmith.data.checkup.findings import Finding, Source, Tally
from bertsmith.data.checkup.lengths import LengthCheck, Lengths, Ruler
from bertsmith.data.checkup.reasons import Reasons
from bertsmith.data.columns import Columns
from bertsmith.data.table_files import Record, Records
from bertsmith.data.tables import is_missing
from bertsmith.errors import UserError

HUGE_CHARACTERS = 1_000_000
"""A longer cell is no text of a person's: a quote that was never closed, or a file in a cell."""

ADVICE_SKIP = "or leave them out with --table.bad_rows skip when training."


class RowTexts:
    """Takes the texts out of records, and counts what is wrong with them."""

    def __init__(
        self,
        columns: Columns,
        *,
        cells: Sequence[int],
        source: Source,
        ruler: Ruler,
        is_apart: bool = False,
    ) -> None:
        """Look at nothing yet.

        Args:
            columns: Of the table.
            cells: Columns that must hold a text.
            source: Of the table.
            ruler: Measures lengths.
            is_apart: Whether a model reads each text by itself; else all of a row together.
        """
        self._columns, self._cells, self._is_apart = columns, cells, is_apart
        self._characters = CharacterCheck()
        self._lengths = LengthCheck(ruler, source, row="text" if is_apart else "row")
        self._broken = Reasons()
        (
            self._empty,
            self._half,
            self._not_texts,
            self._missing,
            self._huge,
            self._headers,
        ) = (Tally() for _ in range(6))
        self._rows = 0

    @property
    def rows(self) -> int:
        """Records so far."""
        return self._rows

    def take(self, record: Record, place: Callable[[], str]) -> tuple[str, ...] | None:
        """The texts of a record; None where it cannot be read or one is missing."""
        self._rows += 1
        if record.fault is not None:
            self._broken.add(place(), record.fault)
            return None
        if _is_header(record.values, self._columns):
            self._headers.add(place())
        texts: list[str] = []
        num_empty = 0
        for cell in (record.values[i] for i in self._cells):
            if is_missing(cell):
                num_empty += 1
            elif not isinstance(cell, str):
                self._not_texts.add(place(), type(cell).__name__)
                return None
            else:
                texts.append(cell)
        if num_empty:
            (self._empty if num_empty == len(self._cells) else self._half).add(place())
            return None
        return tuple(texts)

    def look(self, line: int, texts: tuple[str, ...], place: Callable[[], str]) -> None:
        """Look at the texts of a row that can be used."""
        for text in texts:
            self._characters.look(text, place)
            if len(text) >= HUGE_CHARACTERS:
                self._huge.add(place(), f"{len(text):,} characters")
        if texts[0].strip().lower() in label_names.SURELY_MISSING:
            self._missing.add(place())
        sound = tuple(map(_sound, texts))
        for together in [(text,) for text in sound] if self._is_apart else [sound]:
            self._lengths.add(line, together)

    def lengths(self) -> Lengths | None:
        """Of the texts looked at."""
        return self._lengths.finish()

    def text_findings(self, usable: int, *, unit: str = "rows") -> list[Finding]:
        """What is odd about the characters of so many rows, and about lengths."""
        return [
            *self._characters.findings(usable, unit=unit),
            *self._lengths.findings(unit="texts" if self._is_apart else unit),
        ]

    def row_findings(self) -> list[Finding]:
        """Rows that stop a training, or should."""
        total, broken = self._rows, self._broken
        return [
            *broken.unreadable_rows(
                "rows cannot be read", total=total, advice=f"Correct them, {ADVICE_SKIP}"
            ),
            *self._empty.findings(
                "empty_texts",
                "error",
                "rows have no text",
                total=total,
                advice=f"Delete them, {ADVICE_SKIP}",
            ),
            *self._half.findings(
                "half_empty_pairs",
                "error",
                "rows have one text of the two"
                if len(self._cells) == 2
                else f"rows have not all of their {len(self._cells)} texts",
                total=total,
                advice=f"Complete them, {ADVICE_SKIP}",
            ),
            *self._not_texts.findings(
                "texts_of_another_type",
                "error",
                f"rows have a value that is no text ({self._not_texts.example})",
                total=total,
                advice="Write texts in quotes, or name the right column with --text_column.",
            ),
            *self._headers.findings(
                "repeated_header",
                "error",
                "rows repeat the header line (files joined end to end?)",
                total=total,
                advice="Delete them: they would be learned like any other row.",
            ),
            *self._huge.findings(
                "huge_cells",
                "warning",
                f"cells are of a million characters or more (the first: {self._huge.example})",
                total=total,
                advice="Look for a quote that is never closed, or split the documents.",
            ),
            *self._missing.findings(
                "missing_value_texts",
                "note",
                "rows have a text such as 'nan' or 'null', which programs write for a missing "
                "value",
                total=total,
                advice="They are learned as the words they are; delete them if no one wrote that.",
            ),
        ]


def read_through(records: Records, look: Callable[[Record], None]) -> str | None:
    """Have every row looked at, and close the table.

    Returns:
        What is said of a file that ends in damage; None if it does not.
    """
    try:
        for record in records.rows:
            look(record)
    except UserError as error:
        return str(error)
    finally:
        records.close()
    return None


def _is_header(values: Sequence[object], columns: Columns) -> bool:
    return values[columns.text] == columns.text_name and (
        columns.label is None or values[columns.label] == columns.names[columns.label]
    )


def _sound(text: str) -> str:
    """The text as a tokenizer takes it."""
    return text if text.isascii() else HALF_CHARACTER.sub("\ufffd", text)
