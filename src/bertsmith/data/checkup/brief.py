"""The short form of a checkup: the few warnings that a training says before it begins."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.characters import CharacterCheck
from bertsmith.data.checkup.documents import DocumentCheck
from bertsmith.data.checkup.findings import Finding, Source, worst_first
from bertsmith.data.checkup.lengths import WordRuler
from bertsmith.data.checkup.repeats import (
    DigestWriter,
    RowDigests,
    conflicting_labels,
    leaked_rows,
    repeated_rows,
)
from bertsmith.data.corpus import Document
from bertsmith.data.tables import LabelledTable

ROWS_LOOKED_AT = 50_000
"""Of each table: seconds at most, before hours of training."""

MOST_LINES = 4


def table_warnings(train: LabelledTable[Any], dev: LabelledTable[Any]) -> list[str]:
    """Lines on what may make a training wrong and is said nowhere else in it."""
    rows = _digests(train)
    has_names = all(isinstance(label, str) for label in train.labels)
    kind = label_names.label_kind(rows.names) if has_names else "scores"
    findings = [*repeated_rows(rows), *leaked_rows(rows, _digests(dev), skip_exact=True)]
    findings += conflicting_labels(rows, is_score=kind == "scores")
    if kind == "classes":
        counts = Counter(dict(zip(rows.names, rows.counts().tolist(), strict=True)))
        first = {name: train.labels.index(name) for name in counts}
        place = partial(_label_place, rows, first)
        findings += label_names.typos(counts, place)
        findings += label_names.missing_words(counts, place, total=len(rows))
        findings += label_names.mixed_numbers(counts, place, total=len(rows))
    characters = CharacterCheck()
    for i in range(len(rows)):
        for text in _texts(train, i):
            characters.look(text, partial(rows.at, i))
    return _lines([*findings, *characters.findings(len(rows))])


def text_warnings(texts: Iterable[str]) -> list[str]:
    """Lines on texts to pretrain on, of a sample; those that repeat are told by who drops them."""
    check = DocumentCheck(Source(paths=(Path("the input"),)), ruler=WordRuler())
    documents = (Document(text=t, line=n, packed_bytes=0) for n, t in enumerate(texts, start=1))
    check.look(documents)
    findings = [f for f in check.part("the input").findings if f.check != "repeated_documents"]
    return _lines(findings, has_places=False)


def _digests(table: LabelledTable[Any]) -> RowDigests:
    writer = DigestWriter(Source(paths=(table.path,)))
    for i in range(min(len(table), ROWS_LOOKED_AT)):
        writer.add(table.lines[i] or table.rows[i], _texts(table, i), str(table.labels[i]))
    return writer.finish()


def _texts(table: LabelledTable[Any], row: int) -> Sequence[str]:
    return (table.texts[row],) if table.pairs is None else (table.texts[row], table.pairs[row])


def _label_place(rows: RowDigests, first: dict[str, int], name: str) -> str:
    return rows.at(first[name])


def _lines(findings: list[Finding], *, has_places: bool = True) -> list[str]:
    told = worst_first([f.after_its_count() for f in findings if f.severity != "note"])
    lines = []
    for finding in told[:MOST_LINES]:
        where = f"; the first: {finding.places[0]}" if finding.places and has_places else ""
        lines.append(
            f"warning: {finding.count:,} of {finding.total:,} {finding.what}{where}. "
            f"{finding.advice}"
        )
    if len(told) > MOST_LINES:
        lines.append(f"and {len(told) - MOST_LINES} more warnings: bertsmith doctor lists them")
    return lines
