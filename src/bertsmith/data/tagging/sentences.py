"""Sentences with a tag for each word, read strictly: what cannot be used is an error with its line.

Read are CoNLL files (`checkup.tagged`), JSONL or Parquet with lists of tokens and tags, and JSONL
or Parquet with a text and the spans of it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.checkup.tagged import (
    TAGS,
    TOKENS,
    TaggedSentence,
    plain_words,
    read_conll,
    read_tagged_rows,
)
from bertsmith.data.compressed import ending_of
from bertsmith.data.config import TableConfig
from bertsmith.data.table_files import Record, Records, open_records
from bertsmith.data.tables import LONE_SURROGATE, SKIP_HINT
from bertsmith.errors import UserError

CONLL_ENDINGS = (".conll", ".bio", ".iob", ".iob2")
"""A file with one of these is CoNLL whatever is asked for."""

ALSO_CONLL = (".tsv", ".txt")
"""A file with one of these is CoNLL if tags are asked for."""

SPANS = ("entities", "spans")
TEXTS_AND_SPANS = "texts and their spans"

ROWS_LOOKED_AT = 100
"""Rows that show what a file holds: the first may lack what others have."""
TEXT = "text"

Split = Callable[[str], Sequence[tuple[int, int]]]
"""Where the words of a text stand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """Words, and their tags where they have any."""

    words: tuple[str, ...]
    tags: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    """Line of each word in its file."""

    text: str | None = None
    """What the words stand in, if they were not given as words."""

    bounds: tuple[tuple[int, int], ...] = ()
    """Where each word stands in the text."""

    def with_tags(self, tags: tuple[str, ...]) -> "Sentence":
        """The same with other tags."""
        return replace(self, tags=tags)


@dataclass(frozen=True, kw_only=True)
class TaggedFile:
    """All sentences of a file."""

    path: Path
    form: str
    """How it is written, in words."""

    sentences: tuple[Sentence, ...]
    num_widened: int = 0
    """Spans that begin or end inside a word, of which the whole word was taken."""

    skipped_rows: int = 0
    first_skipped: str | None = None


class _FaultError(Exception):
    """Why a row cannot be used."""


def form_of(path: Path, *, is_asked: bool) -> str | None:
    """How a file of tagged sentences is written, in words; None if it is no such file.

    Args:
        path: The file.
        is_asked: Whether the user says that words have tags.

    Raises:
        UserError: It cannot be read; or tags are asked for and it has none.
    """
    ending = ending_of(path)
    if ending in CONLL_ENDINGS or (is_asked and ending in ALSO_CONLL):
        return "CoNLL"
    if ending in (".jsonl", ".ndjson", ".parquet"):
        records = open_records(path)
        with closing(records):
            lists = {
                name.lower()
                for record in itertools.islice(records.rows, ROWS_LOOKED_AT)
                if record.fault is None
                for name, value in zip(records.columns, record.values, strict=True)
                if isinstance(value, list)
            }
        if lists & set(TOKENS) and lists & set(TAGS):
            return "lists of tokens and tags"
        if has_spans(records.columns) and (is_asked or lists & set(SPANS)):
            return TEXTS_AND_SPANS
    if is_asked:
        raise UserError(
            f"{path}: holds no tagged words; give CoNLL ({', '.join(CONLL_ENDINGS)}, .tsv, .txt), "
            "or JSONL with lists `tokens` and `tags`, or with `text` and `entities`"
        )
    return None


def has_spans(columns: Sequence[str]) -> bool:
    """Whether columns with these names are texts and spans of them."""
    names = {name.lower() for name in columns}
    return TEXT in names and not names.isdisjoint(SPANS)


def read_tagged(path: Path, config: TableConfig, *, split: Split) -> TaggedFile:
    """Read a file of tagged sentences wholly.

    Args:
        path: The file.
        config: Says what becomes of what cannot be used.
        split: Parts a text into words.

    Raises:
        UserError: The file cannot be read, a sentence cannot be used, or none is left.
    """
    form = form_of(path, is_asked=True)
    assert form is not None, "or an error"
    sentences: list[Sentence] = []
    widened = [0]
    num_skipped, first_skipped = 0, None
    for line, made in _read(path, form, split, widened):
        try:
            sentences.append(made())
        except _FaultError as fault:
            message = f"{path}:{line}: {fault}"
            if config.bad_rows == "error":
                raise UserError(f"{message}; {SKIP_HINT}") from None
            num_skipped += 1
            first_skipped = first_skipped or message
    if not sentences:
        skipped = f" ({num_skipped:,} were skipped)" if num_skipped else ""
        raise UserError(f"{path}: has no sentences to use{skipped}")
    return TaggedFile(
        path=path,
        form=form,
        sentences=tuple(sentences),
        num_widened=widened[0],
        skipped_rows=num_skipped,
        first_skipped=first_skipped,
    )


def read_spans(path: Path) -> Iterator[TaggedSentence]:
    """Every row of texts and their spans as a tagged sentence, read past every fault.

    Words are parted without a tokenizer.

    Raises:
        UserError: The file cannot be opened or is damaged.
    """
    for line, made in _read(path, TEXTS_AND_SPANS, plain_words, [0]):
        try:
            one = made()
        except _FaultError as fault:
            yield TaggedSentence(line=line, tokens=(), tags=(), lines=(), fault=str(fault))
            continue
        yield TaggedSentence(line=line, tokens=one.words, tags=one.tags, lines=one.lines)


def _read(
    path: Path, form: str, split: Split, widened: list[int]
) -> Iterator[tuple[int, Callable[[], Sentence]]]:
    """A line and what makes its sentence."""
    if form == "CoNLL":
        yield from _of_tagged(read_conll(path))
        return
    records = open_records(path)
    with closing(records):
        names = [name.lower() for name in records.columns]

        def column(candidates: Sequence[str]) -> int:
            return next(names.index(name) for name in candidates if name in names)

        if form == "lists of tokens and tags":
            places = {"tokens": column(TOKENS), "tags": column(TAGS)}
            yield from _of_tagged(read_tagged_rows(records, **places))
            return
        text, spans = _span_columns(records)
        for record in records.rows:
            line = record.row if record.line is None else record.line

            def made(record: Record = record, line: int = line) -> Sentence:
                return _of_spans(record, text, spans, line=line, split=split, widened=widened)

            yield line, made


def read_sound_spans(path: Path) -> Iterator[tuple[int, str, list[tuple[int, int, str]]]]:
    """Line, text and spans of each row without a fault, up to where the file is damaged.

    Raises:
        UserError: The file cannot be opened.
    """
    records = open_records(path)
    with closing(records):
        places = _span_columns(records)
        with suppress(UserError):
            for record in records.rows:
                with suppress(_FaultError):
                    text, spans = _text_and_spans(record, *places)
                    yield record.row if record.line is None else record.line, text, spans


def _span_columns(records: Records) -> tuple[int, int]:
    """Where the text stands, and where its spans."""
    names = [name.lower() for name in records.columns]
    return names.index(TEXT), next(names.index(name) for name in SPANS if name in names)


def _of_tagged(
    sentences: Iterable[TaggedSentence],
) -> Iterator[tuple[int, Callable[[], Sentence]]]:
    for one in sentences:

        def made(one: TaggedSentence = one) -> Sentence:
            if one.fault is not None:
                raise _FaultError(one.fault)
            if not one.tokens:
                raise _FaultError("the sentence has no tokens")
            for token, tag in zip(one.tokens, one.tags, strict=True):
                if not token.strip() or not tag.strip():
                    raise _FaultError("a token or a tag is empty")
                if LONE_SURROGATE.search(token):
                    raise _FaultError("a token holds half a surrogate pair")
            return Sentence(words=one.tokens, tags=one.tags, lines=one.lines)

        yield one.line, made


def _of_spans(
    record: Record,
    text_at: int,
    spans_at: int,
    *,
    line: int,
    split: Split,
    widened: list[int],
) -> Sentence:
    text, spans = _text_and_spans(record, text_at, spans_at)
    bounds = tuple(split(text))
    if not bounds:
        raise _FaultError("the text has no words")
    return Sentence(
        words=tuple(text[a:b] for a, b in bounds),
        tags=_tags_of(spans, bounds, text, widened),
        lines=(line,) * len(bounds),
        text=text,
        bounds=bounds,
    )


def _text_and_spans(
    record: Record, text_at: int, spans_at: int
) -> tuple[str, list[tuple[int, int, str]]]:
    """A row's text, and its spans in their order."""
    if record.fault is not None:
        raise _FaultError(record.fault)
    text, given = record.values[text_at], record.values[spans_at]
    if not isinstance(text, str) or not text.strip():
        raise _FaultError("the text is missing or empty")
    if LONE_SURROGATE.search(text):
        raise _FaultError("the text holds half a surrogate pair")
    given = [] if given is None else given
    if not isinstance(given, list):
        raise _FaultError("the spans are no list")
    spans = sorted(_span(one, text) for one in given)
    for (_, end, kind), (start, _, other) in pairwise(spans):
        if start < end:
            raise _FaultError(f"a span of {kind!r} and one of {other!r} overlap at {start}")
    return text, spans


def _tags_of(
    spans: Sequence[tuple[int, int, str]],
    bounds: Sequence[tuple[int, int]],
    text: str,
    widened: list[int],
) -> tuple[str, ...]:
    """Tags in IOB2 of the words that spans touch."""
    tags = ["O"] * len(bounds)
    for start, end, kind in spans:
        inside = [i for i, (a, b) in enumerate(bounds) if a < end and start < b]
        if not inside:
            raise _FaultError(f"the span {start} to {end} holds no word")
        if any(tags[i] != "O" for i in inside):
            raise _FaultError(f"two spans share the word {text[slice(*bounds[inside[0]])]!r}")
        widened[0] += bounds[inside[0]][0] < start or end < bounds[inside[-1]][1]
        for i in inside:
            tags[i] = f"{'B' if i == inside[0] else 'I'}-{kind}"
    return tuple(tags)


def _span(one: object, text: str) -> tuple[int, int, str]:
    """Start, end and label."""
    if not isinstance(one, dict):
        raise _FaultError("a span is no object with start, end and label")
    start, end, kind = one.get("start"), one.get("end"), one.get("label")
    if type(start) is not int or type(end) is not int or not isinstance(kind, str) or not kind:
        raise _FaultError("a span needs start and end (whole numbers) and label (a word)")
    if LONE_SURROGATE.search(kind):
        raise _FaultError("the label of a span holds half a surrogate pair")
    if not 0 <= start < end <= len(text):
        raise _FaultError(
            f"the span {start} to {end} lies outside the text of "
            f"{number_of(len(text), 'character')}"
        )
    return start, end, kind
