"""Parts to splits: duplicates out, validation documents apart, shards written and hashed."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.parts import Part, read_part
from bertsmith.data.shards import KINDS
from bertsmith.data.writing import writing_error
from bertsmith.durable import flush

SHARD_TOKENS = 1 << 25
SLAB_TOKENS = 1 << 22
"""Tokens copied at once."""

DOCUMENT_BYTES = 16
"""Of a document's offset and place in a shard."""

CUT_AT_TOKENS = 512
"""The usual maximum, special tokens included; documents beyond it are counted."""


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """What a split came to."""

    shards: int
    documents: int
    tokens: int
    unknown: int
    files: dict[str, dict[str, Any]]
    """bytes and sha256 of each file, by its path in the prepared folder."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Both splits, and what was counted on the way."""

    train: SplitFiles
    valid: SplitFiles
    duplicates: int
    bad: int
    empty: int
    lengths: NDArray[np.int64]
    """Tokens of each document that stayed, special ones not counted."""


def assemble(
    parts: list[Path],
    folder: Path,
    *,
    dtype: np.dtype[Any],
    unk_id: int,
    valid_share: float,
    advance: Callable[[int, int], None],
) -> Assembled:
    """Write `train/` and `valid/`.

    Args:
        parts: Part folders in the order of the corpus.
        folder: An empty folder to write into.
        dtype: Of the ids.
        unk_id: Id of the unknown token, which is counted.
        valid_share: Share of documents to hold out.
        advance: Told the token bytes done and in all.

    Raises:
        UserError: A part is damaged.
        WritingError: Nothing can be written.
    """
    opened = [read_part(path, dtype) for path in parts]
    firsts = np.cumsum([0, *(len(part.documents) for part in opened)])
    high, low, lengths = (
        np.concatenate([np.zeros(0, kind), *(part.documents[name] for part in opened)])
        for name, kind in (("hash_high", "<u8"), ("hash_low", "<u8"), ("tokens", "<i8"))
    )
    keep = _first_of_each(high, low)
    is_valid = _held_out(high, keep, valid_share)
    writers = [_SplitWriter(folder, name, dtype, unk_id) for name in ("train", "valid")]
    total, done = sum(part.tokens.nbytes for part in opened), 0
    try:
        for writer in writers:
            writer.start()
        for number, part in enumerate(opened):
            here = slice(firsts[number], firsts[number + 1])
            for writer, chosen in zip(
                writers, (keep[here] & ~is_valid[here], keep[here] & is_valid[here]), strict=True
            ):
                _copy(part, chosen, writer)
            done += part.tokens.nbytes
            advance(done, total)
        train, valid = (writer.close() for writer in writers)
    except OSError as error:
        per_token = dtype.itemsize + 1.0 / 8.0
        needed = round(per_token * int(lengths[keep].sum())) + DOCUMENT_BYTES * int(keep.sum())
        needed -= sum(writer.written_bytes for writer in writers)
        doing = f"shards of the result, {done:,} of {total:,} bytes of tokens"
        raise writing_error(error, folder, doing, max(needed, 0)) from error
    return Assembled(
        train=train,
        valid=valid,
        duplicates=int(len(keep) - np.count_nonzero(keep)),
        bad=sum(part.counts.bad for part in opened),
        empty=sum(part.counts.empty for part in opened),
        lengths=lengths[keep],
    )


def _first_of_each(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether no earlier document has the same hash."""
    order = np.lexsort((low, high))  # stable: equals keep the order of the corpus
    keep = np.ones(len(high), np.bool_)
    same = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
    keep[order[1:][same]] = False
    return keep


def _held_out(high: NDArray[np.uint64], keep: NDArray[np.bool_], share: float) -> NDArray[np.bool_]:
    """Which documents are for validation: those whose hash is small, whatever else there is.

    Of two documents or more, at least one goes to each side, or a small corpus would have nothing
    to validate on: the one whose hash is smallest (largest, for training).
    """
    kept = np.flatnonzero(keep)
    if share == 0.0 or len(kept) < 2:
        return np.zeros(len(high), np.bool_)
    is_valid = high < np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    if not is_valid[kept].any():
        is_valid[kept[np.argmin(high[kept])]] = True
    if is_valid[kept].all():
        is_valid[kept[np.argmax(high[kept])]] = False
    return is_valid


def _copy(part: Part, chosen: NDArray[np.bool_], writer: "_SplitWriter") -> None:
    """Append the chosen documents of a part, a slab at a time."""
    lengths = part.documents["tokens"]
    starts = np.cumsum(np.concatenate([[0], lengths]))
    first = 0
    while first < len(lengths):
        last = int(np.searchsorted(starts, starts[first] + SLAB_TOKENS, side="right")) - 1
        last = min(max(last, first + 1), len(lengths))
        mine = chosen[first:last]
        if mine.any():
            mask = np.repeat(mine, lengths[first:last])
            tokens = slice(int(starts[first]), int(starts[last]))
            documents = part.documents[first:last][mine]
            writer.add(documents, part.tokens[tokens][mask], part.words[tokens][mask])
        first = last


class _SplitWriter:
    """Gathers documents and writes a shard when there are enough."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], unk_id: int) -> None:
        self._folder, self._split, self._dtype, self._unk_id = folder, split, dtype, unk_id
        self._tokens: list[NDArray[Any]] = []
        self._words: list[NDArray[np.uint8]] = []
        self._documents: list[NDArray[Any]] = []
        self._waiting = 0
        self._shards = self._num_documents = self._num_tokens = self._unknown = 0
        self._files: dict[str, dict[str, Any]] = {}

    @property
    def written_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self._files.values())

    def start(self) -> None:
        (self._folder / self._split).mkdir()

    def add(self, documents: NDArray[Any], tokens: NDArray[Any], words: NDArray[np.uint8]) -> None:
        self._documents.append(documents)
        self._tokens.append(tokens)
        self._words.append(words)
        self._waiting += len(tokens)
        self._num_documents += len(documents)
        self._num_tokens += len(tokens)
        self._unknown += int(np.count_nonzero(tokens == self._unk_id))
        if self._waiting >= SHARD_TOKENS:
            self._flush()

    def close(self) -> SplitFiles:
        if self._documents:
            self._flush()
        return SplitFiles(
            shards=self._shards,
            documents=self._num_documents,
            tokens=self._num_tokens,
            unknown=self._unknown,
            files=self._files,
        )

    def _flush(self) -> None:
        documents = np.concatenate(self._documents)
        arrays = (
            np.concatenate(self._tokens).astype(self._dtype, copy=False),
            np.cumsum(np.concatenate([[0], documents["tokens"]])).astype("<i8"),
            np.packbits(np.concatenate(self._words), bitorder="little"),
            np.stack([documents["file"], documents["line"]], axis=1).astype("<u4"),
        )
        for kind, array in zip(KINDS, arrays, strict=True):
            name = f"{self._split}/{kind}-{self._shards:05}.bin"
            content = array.tobytes()
            path = self._folder / name
            try:
                path.write_bytes(content)
                flush(path)
            except OSError as error:
                error.filename = str(path)  # which one of writing does not say
                raise
            self._files[name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        self._shards += 1
        self._waiting = 0
        self._tokens, self._words, self._documents = [], [], []
