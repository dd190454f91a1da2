"""Bytes that are no text: what no reader of rows can tell, since it reads text already."""

import codecs
import re
from pathlib import Path

from bertsmith.data.checkup.findings import Finding, Tally
from bertsmith.data.compressed import ending_of, open_bytes
from bertsmith.errors import UserError

LONGEST_LINE_BYTES = 1 << 26
"""The readers of tables refuse longer ones, so nothing is looked for behind them."""

HIGH_BYTES = re.compile(rb"[\x80-\xff]+")

BINARY_ENDINGS = (".parquet",)


def check_bytes(path: Path) -> list[Finding]:
    """Undecodable bytes with their offsets, UTF-16, and a byte-order mark.

    Memory is that of the longest line. Damage of an archive ends the look quietly: the reader of
    the rows says it.

    Raises:
        UserError: The file cannot be opened.
    """
    if ending_of(path) in BINARY_ENDINGS:
        return []
    with open_bytes(path) as stream:
        undecodable, guesses = Tally(), set[str]()
        offset = number = 0
        has_mark = False
        while True:
            try:
                line = stream.readline(LONGEST_LINE_BYTES)
            except (OSError, UserError):
                break
            if not line:
                break
            number += 1
            if number == 1:
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    return [_utf16(path)]
                has_mark = line.startswith(codecs.BOM_UTF8)
            if not line.isascii() and (error := _error_in(line)) is not None:
                undecodable.add(
                    f"{path}:{number} (byte {offset + error.start:,}, 0x{line[error.start]:02x})"
                )
                guesses.add(likely_encoding(line))
            offset += len(line)
            if len(line) == LONGEST_LINE_BYTES:
                break
    findings = undecodable.findings(
        "undecodable_bytes",
        "error",
        "lines hold bytes that are not UTF-8" + _guessed(guesses),
        total=number,
        advice=_conversion(guesses),
    )
    if has_mark:
        mark = Tally()
        mark.add(f"{path}:1")
        findings += mark.findings(
            "byte_order_mark",
            "note",
            "file begins with a UTF-8 byte-order mark",
            total=1,
            advice="It is taken off when the file is read here; other tools may read it as text.",
        )
    return findings


def likely_encoding(line: bytes) -> str:
    """The encoding that bytes which are not UTF-8 look like; "" where nothing fits well.

    Accented letters of Latin-1 stand alone among ASCII; Chinese in GBK comes as runs of bytes that
    decode by twos.
    """
    runs = HIGH_BYTES.findall(line)
    num_high = sum(map(len, runs))
    if max(map(len, runs), default=0) <= 2 and num_high * 3 <= len(line):
        return "windows-1252"
    try:
        line.decode("gb18030")
    except UnicodeDecodeError:
        return ""
    return "gb18030"


def _error_in(line: bytes) -> UnicodeDecodeError | None:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def _utf16(path: Path) -> Finding:
    return Finding(
        check="utf16",
        severity="error",
        what="file is UTF-16, of which nothing can be read here",
        count=1,
        total=1,
        places=(f"{path}:1",),
        advice="Save it as UTF-8, for example: iconv -f UTF-16 -t UTF-8.",
    )


def _guessed(guesses: set[str]) -> str:
    names = {"windows-1252": "Latin-1 or Windows-1252", "gb18030": "GBK"}
    guess = next(iter(guesses)) if len(guesses) == 1 else ""
    return f"; they look like {names[guess]}" if guess else ""


def _conversion(guesses: set[str]) -> str:
    guess = next(iter(guesses)) if len(guesses) == 1 else ""
    name = guess.upper() or "ITS_ENCODING"
    return f"Convert the file: iconv -f {name} -t UTF-8 OLD > NEW."
