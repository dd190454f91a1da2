"""Token shards on disk: documents end to end as ids, mapped into memory and never scanned.

How many documents and tokens a shard holds follows from the sizes of its files, so a folder is
opened without reading any, and a shard is mapped when something of it is asked for.

A prepared folder holds `manifest.json`, `tokenizer/` and for each split a folder with, for each
shard: `tokens-NNNNN.bin` (uint16 or uint32 ids without special tokens), `offsets-NNNNN.bin` (int64,
where each document starts, then the end), `words-NNNNN.bin` (a bit for each token, set where it
begins a word, first token in the lowest bit) and `places-NNNNN.bin` (uint32 file and line of each
document). All numbers are little-endian.

Shape legend: D documents of a split, D1 = D + 1; T tokens of a document.
"""

import hashlib
import json
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.tokenizer import Vocab, load_tokenizer
from bertsmith.errors import UserError

MANIFEST_FILE = "manifest.json"
WORDS_KEY = "words"
SCHEMA = 1
Split = Literal["train", "valid"]
KINDS = ("tokens", "offsets", "words", "places")
HASH_CHUNK_BYTES = 1 << 20
COUNT_CHUNK_TOKENS = 1 << 22
"""Tokens counted at once."""

MAPPED_SHARDS = 2048
"""Most shards of a split that stay mapped; Linux lets a process have 65,530 maps, four a shard."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard, mapped."""

    tokens: NDArray[Any]
    offsets_D1: NDArray[np.int64]
    word_bits: NDArray[np.uint8]
    places_D2: NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFiles:
    """Where a shard is, and how much it holds."""

    folder: Path
    number: int
    ids: np.dtype[Any]
    """Type of the token ids."""

    num_documents: int
    num_tokens: int

    def map(self) -> Shard:
        """Map the files.

        Raises:
            UserError: One is gone, was changed since the folder was opened, or does not fit the
                others.
        """
        dtypes: tuple[np.dtype[Any], ...] = (
            self.ids,
            np.dtype("<i8"),
            np.dtype("u1"),
            np.dtype("<u4"),
        )
        counts = (
            self.num_tokens,
            self.num_documents + 1,
            -(-self.num_tokens // 8),
            2 * self.num_documents,
        )
        tokens, offsets_D1, words, places = (
            _mapped(self.folder / f"{kind}-{self.number:05}.bin", dtype, count)
            for kind, dtype, count in zip(KINDS, dtypes, counts, strict=True)
        )
        if int(offsets_D1[-1]) != len(tokens):
            raise UserError(f"{self.folder}: shard {self.number} is inconsistent; prepare again")
        return Shard(
            tokens=tokens, offsets_D1=offsets_D1, word_bits=words, places_D2=places.reshape(-1, 2)
        )


class TokenCorpus:
    """The documents of one split, numbered from 0 across its shards."""

    def __init__(
        self,
        shards: list[ShardFiles],
        *,
        folder: Path,
        vocab: Vocab,
        inputs: list[str],
        fingerprint: str,
        has_words: bool = True,
    ) -> None:
        """Join shards; none is mapped yet.

        Args:
            shards: In order.
            folder: Of the split.
            vocab: Of the ids.
            inputs: Names of the files that the places count.
            fingerprint: Of the content.
            has_words: Whether word starts are those of `data.words`.
        """
        self._has_words = has_words
        self._inputs = inputs
        self._firsts = [0]
        for shard in shards:
            self._firsts.append(self._firsts[-1] + shard.num_documents)
        self._mapped = lru_cache(maxsize=MAPPED_SHARDS)(lambda number: shards[number].map())
        self.num_tokens = sum(shard.num_tokens for shard in shards)
        """Tokens, without special ones."""
        self.folder: Path = folder
        """Of the split; `prepare` replaces the whole of it when the text changes."""
        self.vocab = vocab
        self.fingerprint = fingerprint
        """Changes when a token, the order of documents or the tokenizer changes."""

    @property
    def num_documents(self) -> int:
        """Documents."""
        return self._firsts[-1]

    def lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """Tokens of the documents from `first` to before `stop`, without special ones."""
        if not 0 <= first <= stop <= self.num_documents:
            raise IndexError(f"documents {first} to {stop} of {self.num_documents}")
        parts = [np.zeros(0, np.int64)]
        while first < stop:
            number = bisect_right(self._firsts, first) - 1
            start, end = self._firsts[number], min(self._firsts[number + 1], stop)
            offsets_D1 = self._shard(number, first).offsets_D1
            parts.append(np.diff(offsets_D1[first - start : end - start + 1]))
            first = end
        return np.concatenate(parts)

    def document(self, index: int) -> NDArray[Any]:
        """Ids of a document without special tokens: a read-only view."""
        shard, local = self._find(index)
        return shard.tokens[shard.offsets_D1[local] : shard.offsets_D1[local + 1]]

    def word_starts(self, index: int) -> NDArray[np.bool_]:
        """For each token of a document, whether it begins a word.

        Raises:
            UserError: The text was prepared before whole words were masked.
        """
        if not self._has_words:
            raise UserError(
                f"{self.folder.parent}: was prepared without the beginnings of words; prepare it "
                "again with --overwrite, or give --masking.unit token and --objective mlm"
            )
        shard, local = self._find(index)
        start, end = int(shard.offsets_D1[local]), int(shard.offsets_D1[local + 1])
        first = start // 8
        bits = np.unpackbits(shard.word_bits[first : -(-end // 8)], bitorder="little")
        return bits[start - first * 8 : end - first * 8].astype(np.bool_)

    def type_counts(self) -> NDArray[np.int64]:
        """How often each id occurs, shape (V,); reads every token."""
        counts_V = np.zeros(self.vocab.size, np.int64)
        for number in range(len(self._firsts) - 1):
            tokens = self._shard(number, self._firsts[number]).tokens
            for first in range(0, len(tokens), COUNT_CHUNK_TOKENS):
                chunk = tokens[first : first + COUNT_CHUNK_TOKENS]
                counts_V += np.bincount(chunk, minlength=len(counts_V))
        return counts_V

    def name_of(self, index: int) -> str:
        """Where a document comes from: ``file:line``, for messages."""
        shard, local = self._find(index)
        file, line = shard.places_D2[local].tolist()
        return f"{self._inputs[file]}:{line}"

    def _find(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect_right(self._firsts, index) - 1
        return self._shard(number, index), index - self._firsts[number]

    def _shard(self, number: int, document: int) -> Shard:
        """A shard, for the sake of a document in it."""
        try:
            return self._mapped(number)
        except UserError as error:
            raise UserError(f"{error} (document {document:,} was wanted)") from error


def open_shards(folder: Path, split: Split, *, verify: bool = True) -> TokenCorpus:
    """Open one split of a prepared folder.

    Args:
        folder: What `bertsmith prepare` wrote.
        split: Which documents.
        verify: Whether to compare the files with their hashes, at about the disk's speed. Of
            several processes that open the same folder one is enough. Sizes are always compared.

    Raises:
        UserError: The folder was not prepared wholly, or a file is missing, changed or damaged.
    """
    manifest = read_manifest(folder)
    vocab = load_tokenizer(folder / "tokenizer").vocab
    if vocab.fingerprint != manifest["tokenizer"]["fingerprint"]:
        raise UserError(
            f"{folder / 'tokenizer'}: not the tokenizer the text was prepared with; prepare again"
        )
    files: dict[str, dict[str, Any]] = manifest["files"]
    mine = {name: entry for name, entry in files.items() if name.startswith(f"{split}/")}
    _check_files(folder, mine, verify=verify)
    ids = np.dtype(manifest["token_dtype"]).newbyteorder("<")
    split_folder = folder / split
    shards = [
        ShardFiles(
            folder=split_folder,
            number=number,
            ids=ids,
            num_documents=mine[f"{split}/offsets-{number:05}.bin"]["bytes"] // 8 - 1,
            num_tokens=mine[f"{split}/tokens-{number:05}.bin"]["bytes"] // ids.itemsize,
        )
        for number in range(manifest["shards"][split])
    ]
    return TokenCorpus(
        shards,
        folder=split_folder,
        vocab=vocab,
        inputs=[entry["path"] for entry in manifest["inputs"]],
        fingerprint=_fingerprint(vocab, mine),
        has_words=WORDS_KEY in manifest,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder.

    Raises:
        UserError: There is none, or it is damaged or of another version.
    """
    file = folder / MANIFEST_FILE
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (folder / "parts").is_dir():
            raise UserError(
                f"{folder}: preparation is not finished; run the same `bertsmith prepare` again"
            ) from error
        raise UserError(
            f"{folder}: not a prepared folder (no {MANIFEST_FILE}); make one with "
            "`bertsmith prepare`"
        ) from error
    except NotADirectoryError as error:
        raise UserError(f"{folder}: a file, not a folder that `bertsmith prepare` wrote") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable ({error}); prepare again") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UserError(f"{file}: not a manifest of version {SCHEMA}; prepare again")
    return content


def sha256_of(file: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check_files(folder: Path, files: dict[str, dict[str, Any]], *, verify: bool) -> None:
    """Sizes always, hashes if asked; every split's files are named in the manifest."""
    names = sorted(files)
    for name in names:  # no Path for each: a large corpus has a hundred thousand files
        try:
            size = os.stat(f"{folder}/{name}").st_size
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if size != files[name]["bytes"]:
            raise UserError(
                f"{folder / name}: damaged shard: {size:,} bytes where the manifest says "
                f"{files[name]['bytes']:,} (sha256 {files[name]['sha256']}); prepare again"
            )
    if not verify:
        return

    def check_hash(name: str) -> None:
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if found != files[name]["sha256"]:
            raise UserError(
                f"{folder / name}: damaged shard: sha256 {found} where the manifest says "
                f"{files[name]['sha256']}; prepare again"
            )

    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
        for _ in pool.map(check_hash, names):
            pass


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read: {error.strerror}; prepare again")


def _mapped(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map so many numbers, which the file was seen to hold when the folder was opened."""
    try:
        size = file.stat().st_size
        if size != count * dtype.itemsize:
            raise UserError(
                f"{file}: {size:,} bytes where there were {count * dtype.itemsize:,} when the "
                "folder was opened; put the file back and go on, or prepare again"
            )
        if size == 0:  # nothing to map
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,)))
    except (OSError, ValueError) as error:  # a ValueError: it became shorter just now
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{file}: cannot be read: {reason}; put the file back and go on, or prepare again"
        ) from error


def _fingerprint(vocab: Vocab, files: dict[str, dict[str, Any]]) -> str:
    lines = [vocab.fingerprint, *(f"{name} {files[name]['sha256']}" for name in sorted(files))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
