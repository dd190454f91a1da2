"""Files that survive a power cut: what is renamed into place has reached the disk."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have the disk hold a file or a folder's entries, so that no rename comes before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
