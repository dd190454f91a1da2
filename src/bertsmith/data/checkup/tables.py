"""A labelled table looked over, row by row, past everything that stops the strict reader."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.characters import HALF_CHARACTER
from bertsmith.data.checkup.columns import ColumnCheck, TextColumnCheck
from bertsmith.data.checkup.findings import Finding, Source, Tally, shortened
from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.checkup.label_names import LabelKind, label_kind, parts_of
from bertsmith.data.checkup.lengths import Ruler
from bertsmith.data.checkup.normal import digest_of
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.repeats import (
    DigestWriter,
    conflicting_labels,
    repeated_rows,
    without_label,
)
from bertsmith.data.checkup.row_texts import RowTexts, read_through
from bertsmith.data.columns import Columns
from bertsmith.data.table_files import Record, Records
from bertsmith.data.tables import BadRowError, is_missing, json_list, label_name

LONGEST_LABEL_CHARACTERS = 200

JOINT = "|"
"""Between the names of a row's labels that stand in columns of their own."""


class TableCheck:
    """Everything that is found in one pass over a table."""

    def __init__(
        self,
        path: Path,
        columns: Columns,
        *,
        ruler: Ruler,
        is_several: bool | None = None,
        separator: str | None = None,
    ) -> None:
        """Look at nothing yet.

        Args:
            path: Of the table.
            columns: Where texts and labels are.
            ruler: Measures lengths.
            is_several: Whether a row has several labels; None: as the labels show.
            separator: Sign between them; None: as the labels show.
        """
        self._has_labels = columns.label is not None or bool(columns.labels)
        self._is_several = True if columns.labels else is_several
        self._separator = JOINT if columns.labels else separator
        self.path, self.source = path, Source(paths=(path,))
        self._columns = columns
        used = {columns.text, columns.pair, columns.label, *columns.labels} - {None}
        self._others = ColumnCheck(columns.names, used={i for i in used if i is not None})
        self._text_column = TextColumnCheck()
        cells = [columns.text] + ([] if columns.pair is None else [columns.pair])
        self._texts = RowTexts(columns, cells=cells, source=self.source, ruler=ruler)
        self._digests = DigestWriter(self.source)
        self._labels: Counter[str] = Counter()
        self._first_lines: dict[str, int] = {}
        self._has_lists = False
        self._usable = 0
        self._damage: str | None = None
        (
            self._unlabelled,
            self._null_labels,
            self._bare,
            self._odd_labels,
            self._float_labels,
            self._vectors,
        ) = (Tally() for _ in range(6))

    def look(self, records: Records) -> None:
        """Read every row; a file that ends in damage is told in the findings."""
        self._damage = read_through(records, self._row)

    def _row(self, record: Record) -> None:
        line = record.row if record.line is None else record.line
        place = partial(self.source.at, line)
        columns, values = self._columns, record.values
        texts = self._texts.take(record, place)
        if record.fault is not None:
            return
        label = None
        if columns.label is not None:
            label = self._label(values[columns.label], place())
        elif columns.labels:
            label = self._label_of_columns(values, place())
        self._others.add(values, label or None)
        if texts is None or (self._has_labels and label is None):
            return
        self._usable += 1
        self._texts.look(line, texts, place)
        self._text_column.add(line, texts[0], label)
        self._digests.add(line, texts, label)
        if label is not None:
            self._labels[label] += 1
            self._first_lines.setdefault(label, line)

    def _label(self, value: object, place: str) -> str | None:
        """The label's name; that of a list is its names with commas, and "" where nothing stands.

        Only the whole table shows whether "" is a row without labels or one that lacks its label.
        """
        if isinstance(value, str) and (listed := json_list(value)) is not None:
            value = listed
        if isinstance(value, list) and all(isinstance(v, str | int) for v in value):
            self._has_lists = True
            names = [str(v).strip() for v in value]
            if len(set(names)) < len(names):
                self._vectors.add(place, shortened(", ".join(names)))
                return None
            value = ",".join(names)
        if is_missing(value):
            self._unlabelled.add(place)
            if not isinstance(value, str):
                self._null_labels.add(place)
                return None
            self._bare.add(place)
            return ""
        if not isinstance(value, str | int | float):
            self._odd_labels.add(place, type(value).__name__)
            return None
        if isinstance(value, str) and HALF_CHARACTER.search(value):
            self._odd_labels.add(place, "half a surrogate pair")
            return None
        name = label_name(value)
        if len(name) > LONGEST_LABEL_CHARACTERS:  # free text: told apart, and not kept
            name = f"{name[:LONGEST_LABEL_CHARACTERS]}...{digest_of(name):x}"
        elif name != str(value).strip():
            self._float_labels.add(place, f"{str(value).strip()} is read as {name}")
        return name

    def _label_of_columns(self, values: Sequence[object], place: str) -> str | None:
        """The names of the columns that hold 1."""
        from bertsmith.data.label_sets import read_label_columns  # noqa: PLC0415 - loads torch

        at = self._columns.labels
        names = [self._columns.names[i] for i in at]
        try:
            found = read_label_columns(tuple(values[i] for i in at), names)
        except BadRowError as bad:
            self._odd_labels.add(place, str(bad))
            return None
        if not found:
            self._bare.add(place)
        return JOINT.join(found)

    def part(self) -> Part:
        """What was found, all told."""
        columns = self._columns
        counts, first_lines = self._labels, self._first_lines
        digests = self._digests.finish()
        kind = self._label_kind()
        if kind == "lists":
            counts, first_lines = _opened(counts, first_lines, self._separator)
        elif counts.pop("", 0):
            self._usable -= self._bare.count
            first_lines.pop("")
            digests = without_label(digests, "")
        findings = self._row_findings(kind, has_labels=bool(counts))
        findings += self._text_column.findings(
            self.source, columns.text_name, num_labels=len(counts)
        )
        findings += self._others.findings(self.source, has_label=self._has_labels)
        findings += self._texts.text_findings(self._usable)
        findings += repeated_rows(digests)
        if kind is not None:
            findings += conflicting_labels(digests, is_score=kind == "scores")
        roles = {"text": columns.text_name}
        if columns.pair_name is not None:
            roles["pair"] = columns.pair_name
        if columns.label is not None:
            roles["label"] = columns.label_name
        elif columns.labels:
            roles["label"] = ", ".join(columns.names[i] for i in columns.labels)
        return Part(
            name=str(self.path),
            unit="rows",
            count=self._usable,
            digests=digests,
            labels=counts,
            first_lines=first_lines,
            label_kind=kind,
            label_separator=self._separator if kind == "lists" else None,
            lengths=self._texts.lengths(),
            columns=roles,
            findings=findings,
        )

    def _label_kind(self) -> LabelKind | None:
        """As training would take the labels; finds the separator on the way."""
        if not self._has_labels:
            return None
        several = self._is_several
        if several is None:
            if self._separator is None and not self._has_lists:
                self._separator = label_names.separator_in(self._labels)
            several = self._has_lists or self._separator is not None
        return "lists" if several else label_kind(self._labels.keys() - {""})

    def _row_findings(self, kind: LabelKind | None, *, has_labels: bool) -> list[Finding]:
        """Of rows that stop a training, or should."""
        total = self._texts.rows
        found: list[Finding] = []
        if self._damage is not None:
            found.append(unreadable(self.path, self._damage))
        if not self._usable:
            found.append(nothing_to_use(self.path, "row"))
        elif not self._has_labels and len(self._others.one_hot()[0]) < 2:
            found.append(_no_label(self.path, self._columns))
        found += self._texts.row_findings()
        if kind == "lists":
            found += self._null_labels.findings(
                "missing_labels",
                "error",
                "rows have no list of labels",
                total=total,
                advice="Write [] for a text without labels, or leave such rows out with "
                "--table.bad_rows skip when training.",
            )
            found += self._bare.findings(
                "texts_without_labels",
                "note" if has_labels else "error",
                "rows have no label where others have some"
                if has_labels
                else "rows have no label, and no other row has one",
                total=total,
                advice="They are learned as texts that no label is for; see that this is meant."
                if has_labels
                else "Is this the label column? Name it with --label_column.",
            )
        else:
            found += self._unlabelled.findings(
                "missing_labels",
                "error",
                "rows have no label",
                total=total,
                advice="Label them, or leave them out with --table.bad_rows skip when training.",
            )
        found += self._odd_labels.findings(
            "labels_of_another_type",
            "error",
            f"rows have something else than 0 or 1 for a label ({self._odd_labels.example})"
            if self._columns.labels
            else f"rows have a label that is neither word nor number ({self._odd_labels.example})",
            total=total,
            advice="Write 1 where a text has the label, else 0."
            if self._columns.labels
            else "Write a word, a number or a list of words.",
        )
        found += self._vectors.findings(
            "repeated_in_list",
            "error",
            "rows have a list of labels with one of them twice, as a row of 0 and 1 has (the "
            f"first: {self._vectors.example})",
            total=total,
            advice="Write names, or make a column for each label (--table.label_columns).",
        )
        if kind == "classes":
            found += self._float_labels.findings(
                "float_labels",
                "note",
                f"rows have a class written with a fraction ({self._float_labels.example})",
                total=total,
                advice="Nothing is lost; other tools take such a column for scores.",
            )
        return found


def label_findings(part: Part) -> list[Finding]:
    """What is odd about a part's labels."""
    counts, place = part.labels, part.label_place
    if part.label_kind is None or part.label_kind == "scores" or not counts:
        return []
    found = label_names.free_text(counts, place, total=part.count)
    if found:
        return found
    has_bare_rows = part.label_kind == "lists" and counts.total() < part.count
    return [
        *(
            []
            if len(counts) == 1 and has_bare_rows  # there, or not there
            else label_names.balance(counts, place, total=part.count)
        ),
        *label_names.typos(counts, place),
        *label_names.missing_words(counts, place, total=part.count),
        *label_names.mixed_numbers(counts, place, total=part.count),
        *label_names.rare_labels(counts, place),
    ]


def unreadable(path: Path, reason: str) -> Finding:
    """A file, or the rest of one, of which nothing can be made."""
    said = reason.removeprefix(f"{path}: ")
    return Finding(
        check="unreadable",
        severity="error",
        what=f"file cannot be read to its end: {said}",
        count=1,
        total=1,
        places=(str(path),),
        advice="Repair it: nothing behind that place was looked at.",
    )


def nothing_to_use(path: Path | str, unit: str) -> Finding:
    """A file without one row, sentence or document that can be used."""
    return Finding(
        check="nothing_to_use",
        severity="error",
        what=f"no {unit} of the data can be used",
        count=1,
        total=1,
        places=(str(path),),
        advice="Is it the right file, and are its columns and its ending what they should be?",
    )


def describe_labels(part: Part) -> str | None:
    """One line on the labels."""
    if part.label_kind is None:
        return None
    if part.label_kind == "scores":
        numbers = sorted(part.labels, key=float)
        return f"labels: scores from {numbers[0]} to {numbers[-1]}"
    common = part.labels.most_common()
    if not common:
        return None
    several = " (several a row)" if part.label_kind == "lists" else ""
    row = "token" if part.unit == "sentences" else "row"
    (most, most_rows), (least, least_rows) = common[0], common[-1]
    return (
        f"labels: {len(common):,}{several}, from {shortened(most)} with "
        f"{number_of(most_rows, row)} to {shortened(least)} with {least_rows:,}"
    )


def _opened(
    counts: Counter[str], first_lines: dict[str, int], separator: str | None
) -> tuple[Counter[str], dict[str, int]]:
    """Rows of each single label, of rows with several."""
    single: Counter[str] = Counter()
    first: dict[str, int] = {}
    for name, count in counts.items():
        for part in parts_of(name, separator):
            single[part] += count
            first[part] = min(first.get(part, first_lines[name]), first_lines[name])
    return single, first


def _no_label(path: Path, columns: Columns) -> Finding:
    named = ", ".join(shortened(name) for name in columns.names[:10])
    return Finding(
        check="no_label_column",
        severity="error",
        what=f"table has no column with a usual name of a label; the columns are {named}",
        count=1,
        total=1,
        places=(f"{path}:1",),
        advice="Name it with --label_column.",
    )
