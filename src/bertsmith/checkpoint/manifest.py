"""What a checkpoint folder must hold, and whether it does.

The manifest lists size and sha256 of every file and ends with the sha256 of itself, so that a
flipped bit is noticed wherever it is.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError

SCHEMA_VERSION = 2
"""Of the manifest and of the training state.

1: until 0.2; no settings stored, so that nothing could be compared key by key.
2: settings, data and versions stored; the manifest checks itself.
"""

MANIFEST = "manifest.json"
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that say of a file that it is not there, and nothing about the disk."""

_OWN_DIGEST = "sha256_of_the_above"


class DamagedError(Exception):
    """A checkpoint is not what was written; a few words say what is wrong."""


class UnreadableError(UserError):
    """A checkpoint may be whole, but cannot be looked at: no permission, a disk that fails."""

    def __init__(self, path: Path, error: OSError) -> None:
        """Say what cannot be read, and why."""
        super().__init__(
            f"{path}: cannot be read ({error.strerror or error}), so nobody knows whether it is "
            "whole; nothing was changed. Put that right and start again"
        )


class OtherSchemaError(UserError):
    """A checkpoint is whole, and of a version that this one cannot go on from."""


def facts_of(file: Path) -> dict[str, int | str]:
    """Size and sha256 of a file.

    Raises:
        OSError: It cannot be read.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def render(content: Mapping[str, Any]) -> str:
    """The manifest's text."""
    whole = {"schema_version": SCHEMA_VERSION, **content}
    return _text(whole | {_OWN_DIGEST: hashlib.sha256(_text(whole).encode()).hexdigest()})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against itself; its files are not.

    Raises:
        DamagedError: It is missing or damaged.
        UnreadableError: It is there, and cannot be read.
        OtherSchemaError: Another version wrote it.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        version, digest = content["schema_version"], content.pop(_OWN_DIGEST, None)
        is_whole = digest == hashlib.sha256(_text(content).encode()).hexdigest()
        is_whole &= text == _text(content | {_OWN_DIGEST: digest})
        if version != SCHEMA_VERSION and (is_whole or (version == 1 and digest is None)):
            by = "an older" if version < SCHEMA_VERSION else "a newer"
            raise OtherSchemaError(
                f"{folder}: written by {by} bertsmith (schema {version}, this one reads "
                f"{SCHEMA_VERSION}), so its run cannot go on here; its weights can be used: start "
                f"a new run with --model {folder}"
            )
        if not is_whole:
            raise DamagedError(f"{MANIFEST} is damaged")
    except NOT_THERE as error:
        raise DamagedError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise UnreadableError(folder / MANIFEST, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is damaged") from error
    return content


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        DamagedError: One is not, or is missing.
        UnreadableError: One is there, and cannot be read.
        OtherSchemaError: Another version wrote it.
    """
    content = read_manifest(folder)
    wanted: dict[str, dict[str, Any]] = content["files"]
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing leaves the interpreter's lock
        for name, fault in zip(
            wanted, pool.map(lambda n: _fault_in(folder / n, wanted[n]), wanted), strict=True
        ):
            if fault is not None:
                raise DamagedError(f"{name} {fault}")
    return content


def _fault_in(file: Path, wanted: Mapping[str, Any]) -> str | None:
    """In words; None if there is none."""
    try:
        if file.stat().st_size != wanted["bytes"]:
            return f"has {file.stat().st_size:,} bytes instead of {wanted['bytes']:,}"
        return None if facts_of(file) == wanted else "is damaged (its sha256 is another)"
    except NOT_THERE:
        return "is missing"
    except OSError as error:
        raise UnreadableError(file, error) from error


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=True) + "\n"
