"""Files as plain bytes, whatever they are packed in: nothing, gzip or zstandard.

The first bytes decide, not the ending, so that a renamed file is still read. Damage is a
`UserError` that names the file: a cut-off archive must never pass for a short one.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from bertsmith.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
COMPRESSED_ENDINGS = {".gz": GZIP_MAGIC, ".zst": ZSTD_MAGIC}
CHUNK_BYTES = 1 << 18


def open_bytes(path: Path) -> BinaryIO:
    """The decompressed bytes of a file, for reading from start to end.

    Raises:
        UserError: No such file, no permission, a folder, or an ending (.gz, .zst) that does not
            fit the content. While reading: a damaged or cut-off archive.
    """
    try:
        raw = path.open("rb")
        head = raw.peek(len(ZSTD_MAGIC))[: len(ZSTD_MAGIC)]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    expected = COMPRESSED_ENDINGS.get(path.suffix.lower())
    if expected is not None and head and not head.startswith(expected):
        raw.close()
        raise UserError(f"{path}: ends in {path.suffix} but is not compressed that way; rename it")
    if head.startswith(GZIP_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_Gzip(raw, path), CHUNK_BYTES))
    if head.startswith(ZSTD_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_Zstandard(raw, path), CHUNK_BYTES))
    return raw


def ending_of(path: Path) -> str:
    """The ending that names the format, in lower case: '.csv' for both a.csv and A.CSV.gz."""
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSED_ENDINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class _Gzip(io.RawIOBase):
    """gzip's own reader, with errors that name the file."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._file = gzip.GzipFile(fileobj=raw)
        self._raw, self._path = raw, path

    def readable(self) -> bool:
        return True

    def packed_position(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        try:
            chunk = self._file.read(len(view))
        except EOFError as error:
            raise UserError(f"{self._path}: the gzip data is cut off; get the file anew") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self._path}: the gzip data is damaged ({error})") from error
        view[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        self._raw.close()
        super().close()


class _Zstandard(io.RawIOBase):
    """zstandard frames one after another; a frame without its end is an error, not an end."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw, self._path = raw, path
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._is_inside = False
        self._rest = b""  # read, and belonging to the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def packed_position(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        while not self._ready:
            data = self._rest or self._raw.read(CHUNK_BYTES)
            self._rest = b""
            if not data:
                if self._is_inside:
                    raise UserError(f"{self._path}: the zstd data is cut off; get the file anew")
                return 0
            self._is_inside = True
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except zstandard.ZstdError as error:
                raise UserError(f"{self._path}: the zstd data is damaged ({error})") from error
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._is_inside = False
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def packed_position(stream: BinaryIO) -> int:
    """Bytes of the file on disk that were read so far, whatever they unpack to."""
    raw = getattr(stream, "raw", stream)
    return raw.packed_position() if isinstance(raw, _Gzip | _Zstandard) else stream.tell()
