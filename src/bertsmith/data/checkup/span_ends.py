"""Spans of texts that begin or end inside a word, of which training takes the whole word."""

from pathlib import Path

from bertsmith.data.checkup.findings import Finding, Source, Tally, shortened
from bertsmith.data.tagging.sentences import Split, read_sound_spans


def span_ends(path: Path, words_of: Split) -> list[Finding]:
    """Look at the ends of all spans; a row with a fault, which is told elsewhere, is passed over.

    Args:
        path: A file of texts and their spans.
        words_of: Parts a text into words, as training will.
    """
    source, inside, num_spans = Source(paths=(path,)), Tally(), 0
    for line, text, spans in read_sound_spans(path):
        num_spans += len(spans)
        bounds = words_of(text) if spans else ()
        for start, end, _ in spans:
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
