"""Tables as records: CSV, TSV, JSONL and Parquet files, one record at a time.

A record that cannot be used (ragged, undecodable, broken JSON) is not an exception here: it is
handed on with its `fault`, so that the reader of the table decides whether to stop or to skip
and count. Nothing is guessed: "NA", "null" and "" stay the text they are.
"""

import contextlib
import csv
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertsmith.data.compressed import ending_of, open_bytes
from bertsmith.errors import UserError

MAX_LINE_BYTES = 1 << 26
"""A longer line is a missing line end or the wrong kind of file, not a text."""

JSONL_COLUMNS_FROM = 1000
"""The columns of a JSONL file are the keys of so many first objects."""

PARQUET_ROWS = 4096
"""Rows decoded at a time."""

PARQUET_COPY_BYTES = 1 << 20
"""Bytes decompressed at a time."""

Quoting = Literal["auto", "standard", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a table file."""

    row: int
    """Data row, from 1; a header line is not counted."""

    line: int | None
    """Line of the file on which it starts, from 1; None where a file has no lines (Parquet)."""

    values: tuple[object, ...]
    """A value for each column; text from CSV and TSV, JSON values else, None where absent."""

    fault: str | None = None
    """Why the row cannot be used, and what to do; its values mean nothing then."""

    late_key: str | None = None
    """A key of this JSON object that is no column: it first comes after the rows that name them."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """An open table file: the names of its columns, and its rows once, in order."""

    columns: tuple[str, ...]
    rows: Iterator[Record] = field(repr=False)
    close: Callable[[], None] = field(repr=False)
    """Closes the file; harmless when repeated."""


def open_records(
    path: Path,
    *,
    quoting: Quoting = "auto",
    columns: tuple[str, ...] | None = None,
    takes_lines: bool = False,
) -> Records:
    """Open a table, whose format its ending names.

    Args:
        path: .csv, .tsv, .jsonl (.ndjson) or .parquet, each also with .gz or .zst after it.
        quoting: Whether a double quote opens a quoted field; auto: in CSV, not in TSV.
        columns: Names for the columns of a CSV or TSV file without a header line.
        takes_lines: Whether a .txt file, or standard input for the path `-`, is a table of one
            column named text, a row a line.

    Raises:
        UserError: The file cannot be read, its ending is unknown, or it has no header.
    """
    ending = ending_of(path)
    if columns is not None and ending not in (".csv", ".tsv"):
        raise UserError(f"{path}: --table.columns is for CSV and TSV files without a header line")
    if takes_lines and (ending == ".txt" or str(path) == "-"):
        return _open_lines(path)
    match ending:
        case ".csv" | ".tsv":
            delimiter = "," if ending == ".csv" else "\t"
            is_quoted = quoting == "standard" or (quoting == "auto" and ending == ".csv")
            lines = TextLines(path)
            with _closed_on_error(lines.close):
                return _open_delimited(lines, delimiter, is_quoted=is_quoted, columns=columns)
        case ".jsonl" | ".ndjson":
            lines = TextLines(path)
            with _closed_on_error(lines.close):
                return _open_jsonl(lines)
        case ".parquet":
            return _open_parquet(path)
        case ".json":
            raise UserError(f"{path}: write one JSON object a line and name the file .jsonl")
        case _:
            raise UserError(
                f"{path}: the ending {ending!r} is no table's; use .csv, .tsv, .jsonl or .parquet, "
                "optionally with .gz or .zst after it"
            )


class TextLines:
    """Lines of a file as text, without a byte-order mark, that remembers what it could not decode.

    Undecodable bytes become surrogates, so that reading can go on after them; `take_fault` says
    where they stood. Lines keep their ends, as the csv module wants them: LF or CR LF, or CR in a
    file that has no LF at all.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or standard input for the path `-`."""
        self.path = path
        self.number = 0
        self._file: BinaryIO = sys.stdin.buffer if str(path) == "-" else open_bytes(path)
        self._cr_lines: Iterator[bytes] | None = None
        self._offset = 0
        self._fault: str | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self._next_bytes()
        if not raw:
            raise StopIteration
        if len(raw) == MAX_LINE_BYTES:
            raise UserError(
                f"{self.path}:{self.number + 1}: a line of more than {MAX_LINE_BYTES >> 20} MiB; "
                "is this a text file with line ends?"
            )
        if self.number == 0:
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise UserError(f"{self.path}: the text is UTF-16; save it as UTF-8")
            if raw.startswith(b"\xef\xbb\xbf"):
                self._offset, raw = 3, raw[3:]
        self.number += 1
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._fault is None:
                self._fault = (
                    f"byte {self._offset + error.start} of the file is not UTF-8; "
                    "save the file as UTF-8"
                )
            text = raw.decode("utf-8", errors="surrogateescape")
        self._offset += len(raw)
        return text

    def _next_bytes(self) -> bytes:
        """The next line; empty at the end."""
        if self._cr_lines is not None:
            return next(self._cr_lines, b"")
        raw = self._file.readline(MAX_LINE_BYTES)
        is_whole_file = self.number == 0 and len(raw) < MAX_LINE_BYTES and not raw.endswith(b"\n")
        if is_whole_file and b"\r" in raw:
            self._cr_lines = iter(re.findall(rb"[^\r]*\r|[^\r]+", raw))
            return next(self._cr_lines)
        return raw

    def close(self) -> None:
        """Close the file; standard input is not ours to close."""
        if self._file is not sys.stdin.buffer:
            self._file.close()

    def take_fault(self) -> str | None:
        """What could not be decoded since the last call."""
        fault, self._fault = self._fault, None
        return fault


def _open_delimited(
    lines: TextLines, delimiter: str, *, is_quoted: bool, columns: tuple[str, ...] | None
) -> Records:
    path = lines.path
    fields = _quoted_fields(lines, delimiter) if is_quoted else _plain_fields(lines, delimiter)
    if columns is None:
        header_line, header, fault = next(fields, (1, [], None))
        if fault is not None:
            raise UserError(f"{path}:{header_line}: {fault}")
        if not any(header):
            raise UserError(f"{path}: the file is empty; it needs a header line such as text,label")
        columns = tuple(name.strip() for name in header)
        for name in columns:
            if name and columns.count(name) > 1:
                raise UserError(f"{path}:1: column {name!r} stands twice in the header; rename one")
        if len(columns) == 1 and delimiter == "," and (";" in columns[0] or "\t" in columns[0]):
            raise UserError(
                f"{path}:1: the fields are not separated by commas; save the table with commas, "
                "or with tabs as .tsv"
            )
    rows = _delimited_rows(fields, len(columns), is_quoted=is_quoted)
    return Records(columns=columns, rows=rows, close=lines.close)


def _open_lines(path: Path) -> Records:
    """A row a line. Without a separator a line cannot be split: any line is one text."""
    lines = TextLines(path)

    def fields() -> Iterator[tuple[int, list[str], str | None]]:
        for text in lines:
            yield lines.number, [text.removesuffix("\n").removesuffix("\r")], lines.take_fault()

    rows = _delimited_rows(fields(), 1, is_quoted=False)
    return Records(columns=("text",), rows=rows, close=lines.close)


def _delimited_rows(
    fields: Iterator[tuple[int, list[str], str | None]], width: int, *, is_quoted: bool
) -> Iterator[Record]:
    """Rows with their number; blank lines at the end of the file are no rows."""
    row = 0
    blank_lines: list[int] = []
    for line, values, fault in fields:
        if fault is None and (not values or values == [""]):
            blank_lines.append(line)
            continue
        for blank in blank_lines if width == 1 else []:  # an empty text, in its place
            row += 1
            yield Record(row=row, line=blank, values=("",))
        blank_lines.clear()
        row += 1
        ragged = None if len(values) == width else _ragged(len(values), width, is_quoted)
        yield Record(row=row, line=line, values=tuple(values), fault=fault or ragged)


def _ragged(count: int, width: int, is_quoted: bool) -> str:
    hint = "is a separator inside a text?" if count > width else "is a field missing?"
    now, other = ("standard", "none") if is_quoted else ("none", "standard")
    return (
        f"{count} fields where the header has {width}: {hint} (quotes are read the {now} way; "
        f"--table.quoting {other} is the other)"
    )


def _quoted_fields(lines: TextLines, delimiter: str) -> Iterator[tuple[int, list[str], str | None]]:
    """(first line, fields, fault) by RFC 4180: a quoted field may hold separators and newlines."""
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = lines.number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):  # the rest of the file is inside the quote
                raise UserError(
                    f"{lines.path}:{line}: a quote is opened here and never closed; close it, or "
                    "read quotes as ordinary characters with --table.quoting none"
                ) from error
            lines.take_fault()
            yield line, [], f"not valid CSV: {error}"
            continue
        yield line, values, lines.take_fault()


def _plain_fields(lines: TextLines, delimiter: str) -> Iterator[tuple[int, list[str], str | None]]:
    """(line, fields, fault) where a quote is an ordinary character: one line is one row."""
    for text in lines:
        values = text.removesuffix("\n").removesuffix("\r").split(delimiter)
        yield lines.number, values, lines.take_fault()


def _open_jsonl(lines: TextLines) -> Records:
    path, objects = lines.path, _json_objects(lines)
    first: list[tuple[int, dict[str, object], str | None]] = []
    names: dict[str, None] = {}
    for item in objects:
        first.append(item)
        names |= dict.fromkeys(item[1])
        if len(first) == JSONL_COLUMNS_FROM:
            break
    if not first:
        raise UserError(f"{path}: the file is empty; it needs one JSON object a line")
    if not names:
        raise UserError(f"{path}:{first[0][0]}: {first[0][2] or 'the object has no keys'}")
    columns = tuple(names)

    def rows() -> Iterator[Record]:
        row = 0
        for items in (first, objects):
            for line, values, fault in items:
                row += 1
                late_key = next((k for k in values if k not in names), None)
                values_in_order = tuple(values.get(c) for c in columns)
                yield Record(
                    row=row, line=line, values=values_in_order, fault=fault, late_key=late_key
                )

    return Records(columns=columns, rows=rows(), close=lines.close)


def _json_objects(lines: TextLines) -> Iterator[tuple[int, dict[str, object], str | None]]:
    for text in lines:
        if not text.strip():
            continue
        fault = lines.take_fault()
        values: object = {}
        if fault is None:
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                fault = f"not valid JSON ({reason}); the line is broken or cut off"
            else:
                if not isinstance(values, dict):
                    fault = 'the line is not a JSON object; write {"COLUMN": VALUE, ...}'
        yield lines.number, values if isinstance(values, dict) else {}, fault


def _open_parquet(path: Path) -> Records:
    import pyarrow  # noqa: PLC0415 - a third of a second, for Parquet files only
    import pyarrow.parquet  # noqa: PLC0415

    source: Any = open_bytes(path)
    if not source.seekable():  # compressed as a whole: Parquet is read from its end
        compressed, source = source, tempfile.TemporaryFile()  # noqa: SIM115 - closed by the reader
        with compressed, _closed_on_error(source.close):
            shutil.copyfileobj(compressed, source, PARQUET_COPY_BYTES)
    with _closed_on_error(source.close):
        try:
            file = pyarrow.parquet.ParquetFile(source)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path}: not a readable Parquet file: {reason}") from error
    columns = tuple(file.schema_arrow.names)

    def rows() -> Iterator[Record]:
        row = 0
        try:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for values in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                    row += 1
                    yield Record(row=row, line=None, values=values)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path}: damaged after row {row}: {reason}") from error

    return Records(columns=columns, rows=rows(), close=source.close)


@contextlib.contextmanager
def _closed_on_error(close: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close()
        raise
