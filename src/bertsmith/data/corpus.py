"""Text files as documents, one after the other, each with the place it came from.

Files are read as streams in a fixed order, so a corpus may be larger than memory and every machine
sees the same documents in the same order. What cannot be used is a `UserError` with file and line.
"""

import codecs
import glob
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from bertsmith.data.compressed import ending_of, open_bytes, packed_position
from bertsmith.errors import UserError

TEXT_ENDINGS, JSON_ENDINGS, PARQUET_ENDINGS = (
    (".txt", ".text"),
    (".jsonl", ".ndjson"),
    (".parquet",),
)
MAX_LINE_BYTES = 1 << 28
"""A longer line is no text but damage or a bomb: 256 MiB."""

Documents = Literal["paragraph", "line"]
BadBytes = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How documents are found in files."""

    documents: Documents
    """In .txt files: text between blank lines, or each line."""

    text_field: str
    """Field of .jsonl, column of .parquet."""

    bad_bytes: BadBytes
    """What to do with a document that is not UTF-8: stop, or skip and count it."""

    chinese_words: str = "characters"
    """How Chinese words are found: characters, or jieba and its version (`data.words`)."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and where it stands."""

    text: str
    """Stripped; empty if nothing is left."""

    line: int
    """Line (row, in Parquet) it begins at, from 1."""

    packed_bytes: int
    """Bytes on disk read so far of its file, for progress."""

    is_bad: bool = False
    """Not UTF-8, and to be skipped; its text is empty."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a file that begins and ends between documents."""

    path: str
    start: int = 0
    """Offset in bytes; other than 0 in plain text files alone."""

    end: int | None = None
    """Offset in bytes; None: to the end."""

    first_line: int = 1
    """Number of the line at `start`."""


def find_files(inputs: list[str]) -> list[Path]:
    """The text files that paths, folders and globs name, each once, in a fixed order.

    Raises:
        UserError: Nothing is found, or a named file is of a kind that is not read.
    """
    endings = TEXT_ENDINGS + JSON_ENDINGS + PARQUET_ENDINGS
    if not inputs:
        raise UserError("--input: name files, folders or globs of text")
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and ending_of(p) in endings)
            if not inside:
                raise UserError(f"--input {name}: the folder holds no {', '.join(endings)} file")
            found += inside
        elif path.exists():
            if ending_of(path) not in endings:
                raise UserError(
                    f"--input {name}: not a kind that is read; use {', '.join(endings)}, also with "
                    ".gz or .zst"
                )
            found.append(path)
        else:
            matches = sorted(Path(p) for p in glob.glob(name, recursive=True))
            matches = [p for p in matches if p.is_file() and ending_of(p) in endings]
            if not matches:
                raise UserError(f"--input {name}: no such file or folder")
            found += matches
    return list(dict.fromkeys(found))


def is_splittable(path: Path) -> bool:
    """Whether spans of the file can be read without reading what stands before them."""
    return path.suffix.lower() in TEXT_ENDINGS + JSON_ENDINGS


def separator(path: Path, options: ReadOptions) -> re.Pattern[bytes]:
    """What surely lies between two documents of a splittable file; the next begins after it."""
    by_line = ending_of(path) in JSON_ENDINGS or options.documents == "line"
    return re.compile(rb"\n" if by_line else rb"\n[ \t\r]*\n")


def read_documents(span: Span, options: ReadOptions) -> Iterator[Document]:
    """Every document of a span, empty and bad ones too, so that they can be counted.

    Raises:
        UserError: The file is damaged, a line is no JSON object, a field is missing, or bytes are
            not UTF-8 and the policy says to stop.
    """
    path = Path(span.path)
    with open_bytes(path) as stream:
        if span.start:
            stream.seek(span.start)
        match ending_of(path):
            case ".parquet":
                yield from _parquet(stream, path, options)
            case ".jsonl" | ".ndjson":
                yield from _jsonl(stream, span, options)
            case _:
                yield from _text(stream, span, options)


def _lines(stream: BinaryIO, span: Span) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset, line without its end), a byte-order mark taken off."""
    offset, number = span.start, span.first_line - 1
    while span.end is None or offset < span.end:
        try:
            line = stream.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise UserError(
                f"{span.path}:{number + 1}: cannot be read at byte {offset:,}: "
                f"{error.strerror or error}"
            ) from error
        if not line:
            return
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise UserError(f"{span.path}:{number}: the line is over {MAX_LINE_BYTES:,} bytes long")
        start = 0
        if offset == 0:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{span.path}: the text is UTF-16; convert the file to UTF-8")
            start = 3 if line.startswith(codecs.BOM_UTF8) else 0
        yield number, offset + start, line[start:].rstrip(b"\r\n")
        offset += len(line)


def _decoded(line: bytes, path: str, offset: int, options: ReadOptions) -> str | None:
    """The line as text; None if it is not UTF-8 and is to be skipped."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if options.bad_bytes == "skip":
            return None
        raise UserError(
            f"{path}: byte {offset + error.start:,} is not UTF-8 (0x{line[error.start]:02x}); "
            "convert the file, or give --bad_bytes skip to leave such documents out and count them"
        ) from error


def _text(stream: BinaryIO, span: Span, options: ReadOptions) -> Iterator[Document]:
    parts: list[str] = []
    first, is_bad, size = 1, False, 0

    def document() -> Document:
        return Document(
            text="" if is_bad else "\n".join(parts).strip(),
            line=first,
            packed_bytes=packed_position(stream),
            is_bad=is_bad,
        )

    for line_number, offset, line in _lines(stream, span):
        text = _decoded(line, span.path, offset, options)
        is_blank = text is not None and not text.strip()
        if options.documents == "line":
            parts, first, is_bad = [text or ""], line_number, text is None
            if not is_blank:
                yield document()
        elif is_blank:
            if parts or is_bad:
                yield document()
            parts, is_bad = [], False
        else:
            if not parts and not is_bad:
                first, size = line_number, 0
            size += len(line)
            if size > MAX_LINE_BYTES:
                raise UserError(
                    f"{span.path}:{first}: the paragraph is over {MAX_LINE_BYTES:,} bytes long; "
                    "paragraphs end at an empty line; give --documents line if lines are meant"
                )
            is_bad = is_bad or text is None
            parts.append(text or "")
    if options.documents == "paragraph" and (parts or is_bad):
        yield document()


def _jsonl(stream: BinaryIO, span: Span, options: ReadOptions) -> Iterator[Document]:
    for line_number, offset, line in _lines(stream, span):
        if not line.strip():
            continue
        decoded = _decoded(line, span.path, offset, options)
        place = f"{span.path}:{line_number}"
        text = None if decoded is None else _field_of(decoded, place, options)
        yield Document(
            text=text or "",
            line=line_number,
            packed_bytes=packed_position(stream),
            is_bad=text is None,
        )


def _field_of(line: str, place: str, options: ReadOptions) -> str | None:
    """The text field of a JSON line; a null text is an empty one, a broken one to skip is None."""
    field = options.text_field
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place}: not a JSON object ({error}); repair or delete the line"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{place}: not a JSON object; each line must be one")
    if field not in content:
        raise UserError(
            f"{place}: no field {field!r} (there are {', '.join(map(repr, content)) or 'none'}); "
            "name it with --text_field"
        )
    text = content[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: field {field!r} is {type(text).__name__}, not a text")
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape
        if options.bad_bytes == "skip":
            return None
        raise UserError(
            f"{place}: field {field!r} holds half a character (a lone surrogate); repair the line, "
            "or give --bad_bytes skip"
        ) from error
    return (text or "").strip()


def _parquet(stream: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Document]:
    is_plain = path.suffix.lower() == ".parquet"
    size = path.stat().st_size
    try:
        # Parquet is read from its end: a compressed one has to be unpacked first.
        file = pq.ParquetFile(path if is_plain else io.BytesIO(stream.read()))
        if options.text_field not in file.schema_arrow.names:
            raise UserError(
                f"{path}: no column {options.text_field!r} (there are "
                f"{', '.join(map(repr, file.schema_arrow.names))}); name it with --text_field"
            )
        row, total = 0, max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=4096, columns=[options.text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is not None and not isinstance(text, str):
                    raise UserError(
                        f"{path}: row {row}: column {options.text_field!r} holds "
                        f"{type(text).__name__}, not texts"
                    )
                yield Document(
                    text=(text or "").strip(),
                    line=row,
                    packed_bytes=size * row // total,
                )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable Parquet file ({reason})") from error
