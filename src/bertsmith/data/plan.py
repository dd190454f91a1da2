"""What a preparation will read: files with their hashes, cut into units of work.

The plan is a function of the files' content, their order and the options, so every machine that
sees the same files makes the same units, and a unit's key says whether its work is already done.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from bertsmith.data.corpus import ReadOptions, Span, is_splittable, separator
from bertsmith.errors import UserError

SCHEMA = 1
UNIT_BYTES_LEAST, UNIT_BYTES_MOST = 1 << 20, 1 << 26
UNITS_WANTED = 256
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file to read, and where it may be cut."""

    path: str
    bytes: int
    mtime_ns: int
    """When it was changed last; with the same size, saves hashing it again."""

    sha256: str
    cuts: list[list[int]]
    """(offset, line number) of each place where a unit may begin; the first is [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Work for one process: some spans, whose documents go into one part."""

    number: int
    key: str
    """Hash of all that the part depends on, the tokenizer left out."""

    spans: tuple[Span, ...]
    file_numbers: tuple[int, ...]
    """Which input file each span is of."""

    span_bytes: tuple[int, ...]
    """Bytes on disk of each span."""


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Where the vocabulary comes from: a fingerprint of a given one, or how to train it."""

    fingerprint: str | None
    vocab_size: int
    lowercase: bool
    min_frequency: int
    sample_mb: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the result follows from."""

    read: ReadOptions
    valid_share: float
    tokenizer: TokenizerOptions
    unit_bytes: int
    inputs: list[InputFile]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: It is something else.
        """
        return cls(
            read=ReadOptions(**content["read"]),
            valid_share=content["valid_share"],
            tokenizer=TokenizerOptions(**content["tokenizer"]),
            unit_bytes=content["unit_bytes"],
            inputs=[InputFile(**entry) for entry in content["inputs"]],
        )

    def differences(self, other: "Plan") -> list[str]:
        """How another plan's result may differ from this one's, in a user's words."""
        mine = asdict(self.read) | asdict(self.tokenizer) | {"valid_share": self.valid_share}
        theirs = asdict(other.read) | asdict(other.tokenizer) | {"valid_share": other.valid_share}
        if self.tokenizer.fingerprint and other.tokenizer.fingerprint:
            for name in ("vocab_size", "lowercase", "min_frequency", "sample_mb"):
                mine[name] = theirs[name]
        found = [
            f"{name} was {mine[name]}, is {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name]
        ]
        here, there = ({i.sha256 for i in plan.inputs} for plan in (self, other))
        gone = [i.path for i in self.inputs if i.sha256 not in there]
        new = [i.path for i in other.inputs if i.sha256 not in here]
        changed = sorted(set(gone) & set(new))
        found += [f"{path} has changed" for path in changed]
        found += [f"{path} is new" for path in new if path not in changed]
        found += [f"{path} is missing" for path in gone if path not in changed]
        if not found and [i.sha256 for i in self.inputs] != [i.sha256 for i in other.inputs]:
            found.append("the order of the files has changed")
        return found

    def check_inputs_stayed(self) -> None:
        """Refuse files that were changed since the plan was made: parts of them may be of both.

        Raises:
            UserError: One was changed, or is gone.
        """
        for entry in self.inputs:
            try:
                status = Path(entry.path).stat()
            except OSError as error:
                raise UserError(f"{entry.path}: cannot be read: {error.strerror}") from error
            if (status.st_size, status.st_mtime_ns) != (entry.bytes, entry.mtime_ns):
                raise UserError(
                    f"{entry.path}: was changed while it was being read; run the same command again"
                )

    def units(self) -> list[Unit]:
        """The units of work, in the order of the corpus."""
        groups: list[list[tuple[int, Span, int]]] = []
        filled = self.unit_bytes
        for number, file in enumerate(self.inputs):
            ends: list[int | None] = [start for start, _ in file.cuts[1:]]
            for (start, line), end in zip(file.cuts, [*ends, None], strict=True):
                size = (file.bytes if end is None else end) - start
                if filled + size > self.unit_bytes:
                    groups.append([])
                    filled = 0
                span = Span(path=file.path, start=start, end=end, first_line=line)
                groups[-1].append((number, span, size))
                filled += size
        return [self._unit(number, group) for number, group in enumerate(groups)]

    def _unit(self, number: int, group: list[tuple[int, Span, int]]) -> Unit:
        content = [
            [SCHEMA, asdict(self.read)],
            [[n, self.inputs[n].sha256, span.start, span.end] for n, span, _ in group],
        ]
        return Unit(
            number=number,
            key=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            spans=tuple(span for _, span, _ in group),
            file_numbers=tuple(n for n, _, _ in group),
            span_bytes=tuple(size for _, _, size in group),
        )


def make_plan(
    files: list[Path],
    *,
    read: ReadOptions,
    valid_share: float,
    tokenizer: TokenizerOptions,
    known: Plan | None,
    advance: Callable[[int, int], None],
) -> Plan:
    """Look at the files.

    Args:
        files: In the order of the corpus.
        read: How documents are found in them.
        valid_share: Share of documents held out.
        tokenizer: Where the vocabulary comes from.
        known: An earlier plan: a file whose path, size and time are in it is not hashed again.
        advance: Told the bytes hashed and in all.

    Raises:
        UserError: A file is empty or cannot be read.
    """
    try:
        statuses = [path.stat() for path in files]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    sizes = [status.st_size for status in statuses]
    for path, size in zip(files, sizes, strict=True):
        if size == 0:
            raise UserError(f"{path}: the file is empty; take it out of the input")
    unit_bytes = min(max(sum(sizes) // UNITS_WANTED, UNIT_BYTES_LEAST), UNIT_BYTES_MOST)
    may_know = known is not None and (known.unit_bytes, known.read) == (unit_bytes, read)
    seen = {entry.path: entry for entry in known.inputs} if known and may_know else {}
    inputs: list[InputFile] = []
    done = 0
    for path, status in zip(files, statuses, strict=True):
        entry = seen.get(str(path))
        if entry is None or (entry.bytes, entry.mtime_ns) != (status.st_size, status.st_mtime_ns):
            entry = _look_at(path, read, unit_bytes)
        inputs.append(entry)
        done += status.st_size
        advance(done, sum(sizes))
    return Plan(
        read=read,
        valid_share=valid_share,
        tokenizer=tokenizer,
        unit_bytes=unit_bytes,
        inputs=inputs,
    )


def _look_at(path: Path, read: ReadOptions, unit_bytes: int) -> InputFile:
    """Hash a file, and find places between documents at about every `unit_bytes`."""
    digest = hashlib.sha256()
    between = separator(path, read)
    splits = is_splittable(path)
    cuts = [[0, 1]]
    offset, line = 0, 1
    try:
        status = path.stat()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                if splits:
                    if offset + len(chunk) - cuts[-1][0] >= unit_bytes:
                        found = between.search(chunk, max(cuts[-1][0] + unit_bytes - offset, 0))
                        if found and offset + found.end() < status.st_size:
                            newlines = chunk.count(b"\n", 0, found.end())
                            cuts.append([offset + found.end(), line + newlines])
                    line += chunk.count(b"\n")
                offset += len(chunk)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return InputFile(
        path=str(path),
        bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=digest.hexdigest(),
        cuts=cuts,
    )
