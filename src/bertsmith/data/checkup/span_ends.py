"""Spans of texts that begin or end inside a word, of which training takes the whole word."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from bertsmith.data.checkup.findings import Finding, Source, Tally, shortened
from bertsmith.data.table_files import open_records
from bertsmith.data.tagging.sentences import SPANS, TEXT
from bertsmith.errors import UserError

WordsOf = Callable[[str], Sequence[tuple[int, int]]]
"""Where the words of a text stand."""


def span_ends(path: Path, words_of: WordsOf) -> list[Finding]:
    """Look at the ends of all spans; a row with a fault, which is told elsewhere, is passed over.

    Args:
        path: A file of texts and their spans.
        words_of: Parts a text into words, as training will.
    """
    source, inside, num_spans = Source(paths=(path,)), Tally(), 0
    for line, text, spans in _rows(path):
        num_spans += len(spans)
        bounds = words_of(text) if spans else ()
        for start, end in spans:
            word = next((text[a:b] for a, b in bounds if a < start < b or a < end < b), None)
            if word is not None:
                shown = f"{shortened(text[start:end])} cuts {shortened(word)}"
                inside.add(f"{source.at(line)} ({shown})")
    return inside.findings(
        "spans_inside_words",
        "warning",
        "spans begin or end inside a word",
        total=num_spans,
        advice="Training takes the whole word; correct start and end if it is not meant.",
    )


def _rows(path: Path) -> Iterator[tuple[int, str, list[tuple[int, int]]]]:
    """Line, text and spans of each sound row, up to where the file is damaged."""
    records = open_records(path)
    with closing(records):
        names = [name.lower() for name in records.columns]
        text_at = names.index(TEXT)
        spans_at = next(names.index(name) for name in SPANS if name in names)
        try:
            for record in records.rows:
                text, given = record.values[text_at], record.values[spans_at]
                if record.fault is not None or not isinstance(text, str):
                    continue
                spans = _spans(given, text)
                if spans is not None:
                    yield record.row if record.line is None else record.line, text, spans
        except UserError:  # whoever reads the sentences says it
            return


def _spans(given: object, text: str) -> list[tuple[int, int]] | None:
    """Start and end of each; None if one lacks something, or leaves the text."""
    spans: list[tuple[int, int]] = []
    for one in given if isinstance(given, list) else []:
        if not isinstance(one, dict) or not isinstance(one.get("label"), str):
            return None
        start, end = one.get("start"), one.get("end")
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text):
            return None
        spans.append((start, end))
    return spans
