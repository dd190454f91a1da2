"""What a disk would hold after a power cut, from the injector's journal of a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call on the disk, just before it is made."""

    name: str
    paths: list[str]
    """Below the run folder; a rename has two."""

    tree: dict[str, int] = field(repr=False)
    """Inode of each path below the run folder; those of folders end with a slash."""

    flushed: dict[int, bytes] = field(repr=False)
    """Content of each file, by inode, as it was last flushed to the disk."""


def read_journal(folder: Path) -> Iterator[Call]:
    """The calls of a run in their order; the flushed contents grow from one to the next."""
    flushed: dict[int, bytes] = {}
    for text in (folder / "calls.jsonl").read_text().splitlines():
        line: dict[str, Any] = json.loads(text)
        there = set(line["tree"].values())
        flushed = {inode: content for inode, content in flushed.items() if inode in there}
        yield Call(name=line["call"], paths=line["paths"], tree=line["tree"], flushed=flushed)
        if "copy" in line:
            flushed = flushed | {line["inode"]: (folder / line["copy"]).read_bytes()}


def write_as_after_a_power_cut(call: Call, folder: Path) -> None:
    """The tree as it was, of each file only what had been flushed: names may survive their content.

    A file system may write names before contents; what was never flushed is empty then.
    """
    folder.mkdir()
    for path, inode in sorted(call.tree.items()):
        if path.endswith("/"):
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(call.flushed.get(inode, b""))
