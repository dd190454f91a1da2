"""Files that survive a power cut: what is renamed into place has reached the disk."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk that has no room for what is written."""


def flush(path: Path) -> None:
    """Have the disk hold a file or a folder's entries, so that no rename comes before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, and have the disk hold its new name."""
    old.rename(new)
    flush(new.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, replacing one that is there.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    fresh = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        flush(fresh)
        fresh.replace(path)
        flush(path.parent)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def write_folder(folder: Path, *, fresh: Path, aside: Path, write: Callable[[Path], None]) -> None:
    """Write a folder of files that is there whole or not at all, replacing one that is there.

    Args:
        folder: Its name.
        fresh: A name beside it that nothing has, for what is not whole yet.
        aside: One for what is replaced. A process killed between two renames leaves it there, and
            nothing under the name; whoever looks for the folder later has to put it back.
        write: Fills the folder that it is given.

    Raises:
        OSError: It cannot be written. What was there is in its place; or what is new, whole, if
            only its name could not be flushed.
    """
    try:
        fresh.mkdir(parents=True)
        write(fresh)
        for file in sorted(fresh.iterdir()):
            flush(file)
        flush(fresh)
        _put_in_place(fresh, folder, aside)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put_in_place(fresh: Path, folder: Path, aside: Path) -> None:
    if not folder.exists():
        rename(fresh, folder)
        return
    shutil.rmtree(aside, ignore_errors=True)
    try:
        rename(folder, aside)  # a rename whose flush fails has been made all the same
        rename(fresh, folder)
    except OSError:
        if not folder.exists():
            with suppress(OSError):
                aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def why_not_written(error: OSError, place: Path, *, needed_bytes: int | None = None) -> str:
    """The system's own words, and for a full disk what is free.

    Args:
        error: Of writing.
        place: The file or folder that could not be written; need not exist.
        needed_bytes: About what was to be written, if that is known.
    """
    said = error.strerror or str(error)
    if error.errno not in FULL:
        return said
    while not place.is_dir():
        place = place.parent
    needed = "" if needed_bytes is None else f"it needs {needed_bytes:,} bytes, "
    return f"{said}: {needed}{shutil.disk_usage(place).free:,} are free"
