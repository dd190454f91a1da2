"""What is known of one file or set of files after it was looked over."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.data.checkup.findings import Finding, Source
from bertsmith.data.checkup.label_names import LabelKind
from bertsmith.data.checkup.lengths import Lengths
from bertsmith.data.checkup.repeats import DigestWriter, RowDigests


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file to learn from or to judge by."""

    name: str
    unit: str
    """What is counted: rows, pairs, sentences, documents."""

    count: int
    """Of those that can be used."""

    digests: RowDigests
    labels: Counter[str]
    """Rows of each label; of lists, rows that have it. Empty without labels."""

    first_lines: dict[str, int]
    """Where each label first stands."""

    label_kind: LabelKind | None
    label_separator: str | None = None
    """Sign between the labels of a row."""

    lengths: Lengths | None
    columns: dict[str, str]
    """Role (text, pair, label, score, negative) to name of the column."""

    findings: list[Finding]
    """Of this part alone."""

    def label_place(self, name: str) -> str:
        """Where a label first stands."""
        return self.digests.source.at(self.first_lines[name])

    def as_json(self) -> dict[str, Any]:
        """Facts, without the findings."""
        return {
            "data": self.name,
            "unit": self.unit,
            "count": self.count,
            "columns": self.columns,
            "label_kind": self.label_kind,
            "labels": dict(self.labels.most_common()) if self.label_kind != "scores" else None,
            "lengths": None if self.lengths is None else self.lengths.as_json(),
        }


def nothing_of(path: Path, findings: list[Finding]) -> Part:
    """A file of which nothing could be read, and why."""
    return Part(
        name=str(path),
        unit="rows",
        count=0,
        digests=DigestWriter(Source(paths=(path,))).finish(),
        labels=Counter(),
        first_lines={},
        label_kind=None,
        lengths=None,
        columns={},
        findings=findings,
    )
