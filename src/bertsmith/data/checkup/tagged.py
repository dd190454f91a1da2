"""Sentences with a tag for each token, read past every fault: CoNLL files, or rows of tokens+tags.

CoNLL: a token a line with its tag last, separated by a tab or else by blanks; an empty line ends a
sentence; lines that begin with -DOCSTART- are no tokens.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bertsmith.data.checkup.characters import HALF_CHARACTER
from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.compressed import open_bytes
from bertsmith.data.table_files import Records, TextLines
from bertsmith.errors import UserError

TAGGED_LINE = re.compile(r"\S\s+(O|[BIESMLU]-\S+)\s*$")
LOOKED_AT_BYTES = 1 << 14

_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ffff"
_WORD = re.compile(rf"[{_CHINESE}]|[^\W_{_CHINESE}]+|[^\w\s]|_")
"""A Chinese character, a run of letters and digits, or a sign."""

TOKENS = ("tokens", "words")
TAGS = ("tags", "ner_tags", "pos_tags", "labels", "upos")
"""Names of the columns that hold lists."""


@dataclass(frozen=True, kw_only=True)
class TaggedSentence:
    """One sentence and where it begins."""

    line: int
    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    """As long as `tokens`, unless `fault` says otherwise."""

    lines: tuple[int, ...]
    """Line of each token."""

    fault: str | None = None
    """Why it cannot be used."""


def tagged_columns(names: tuple[str, ...]) -> tuple[int, int] | None:
    """Positions of the tokens and the tags; None in a table that is no such thing."""
    by_name = {name.lower(): i for i, name in enumerate(names)}
    tokens = next((by_name[n] for n in TOKENS if n in by_name), None)
    tags = next((by_name[n] for n in TAGS if n in by_name), None)
    return None if tokens is None or tags is None else (tokens, tags)


def plain_words(text: str) -> list[tuple[int, int]]:
    """Where the words of a text stand, about as BERT's tokenizers part it, if none is at hand."""
    return [match.span() for match in _WORD.finditer(text)]


def is_tag(value: object) -> bool:
    """Whether a cell of a list can be a tag: a word, or a number that stands for one."""
    if isinstance(value, str):
        return not HALF_CHARACTER.search(value)
    return isinstance(value, int) and not isinstance(value, bool)


def looks_tagged(path: Path) -> bool:
    """Whether a text file's first lines all end in a tag of a span, so that it is CoNLL."""
    with open_bytes(path) as stream:
        try:
            head = stream.read(LOOKED_AT_BYTES).decode("utf-8", "replace")
        except (OSError, UserError):
            return False
    lines = [line for line in head.splitlines()[:-1] if line.strip()]
    return len(lines) > 1 and all(
        TAGGED_LINE.search(line) or line.startswith("-DOCSTART-") for line in lines
    )


def read_conll(path: Path, *, has_tags: bool = True) -> Iterator[TaggedSentence]:
    """Every sentence of a CoNLL file.

    Args:
        path: The file.
        has_tags: Whether each word must have one; else a word may stand alone.

    Raises:
        UserError: The file cannot be opened, or is no text with lines.
    """
    lines = TextLines(path)
    rows: list[tuple[int, str, str]] = []
    fault: str | None = None
    try:
        for raw in lines:
            number, text = lines.number, raw.rstrip("\r\n")
            undecodable = lines.take_fault()
            if not text.strip():
                if rows:
                    yield _sentence(rows, fault)
                rows, fault = [], None
                continue
            if text.startswith("-DOCSTART-"):
                continue
            fields = text.split("\t") if "\t" in text else text.split()
            fault = fault or undecodable
            lacks_tag = len(fields) < 2 or not fields[-1].strip()
            if not fields[0].strip() or (has_tags and lacks_tag):
                fault = fault or f"line {number} lacks a token or a tag"
            rows.append((number, fields[0].strip(), fields[-1].strip()))
        if rows:
            yield _sentence(rows, fault)
    finally:
        lines.close()


def read_tagged_rows(records: Records, *, tokens: int, tags: int) -> Iterator[TaggedSentence]:
    """Every row of a table whose cells are lists.

    Args:
        records: An open JSONL or Parquet table.
        tokens: Position of the column of tokens.
        tags: Position of the column of tags.

    Raises:
        UserError: The file is damaged.
    """
    for record in records.rows:
        line = record.row if record.line is None else record.line
        if record.fault is not None:
            yield TaggedSentence(line=line, tokens=(), tags=(), lines=(), fault=record.fault)
            continue
        words, marks = record.values[tokens], record.values[tags]
        if not isinstance(words, list) or not isinstance(marks, list):
            fault = "tokens and tags are not both lists"
            yield TaggedSentence(line=line, tokens=(), tags=(), lines=(), fault=fault)
            continue
        fault = ""
        if not all(isinstance(word, str) for word in words):
            fault = "a token is not a text"
        elif not all(is_tag(mark) for mark in marks):
            odd = next(mark for mark in marks if not is_tag(mark))
            fault = f"the tag {json.dumps(odd)} is neither a word nor a whole number"
        elif len(words) != len(marks):
            fault = f"{number_of(len(words), 'token')} and {number_of(len(marks), 'tag')}"
        yield TaggedSentence(
            line=line,
            tokens=tuple(map(str, words)),
            tags=tuple(map(str, marks)),
            lines=(line,) * len(words),
            fault=fault or None,
        )


def _sentence(rows: list[tuple[int, str, str]], fault: str | None) -> TaggedSentence:
    return TaggedSentence(
        line=rows[0][0],
        tokens=tuple(token for _, token, _ in rows),
        tags=tuple(tag for _, _, tag in rows),
        lines=tuple(line for line, _, _ in rows),
        fault=fault,
    )
