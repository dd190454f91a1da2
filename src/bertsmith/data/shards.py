"""Token shards on disk: documents end to end as ids, mapped into memory and never scanned.

A prepared folder holds `manifest.json`, `tokenizer/` and for each split a folder with, for each
shard: `tokens-NNNNN.bin` (uint16 or uint32 ids without special tokens), `offsets-NNNNN.bin` (int64,
where each document starts, then the end), `words-NNNNN.bin` (a bit for each token, set where it
begins a word, first token in the lowest bit) and `places-NNNNN.bin` (uint32 file and line of each
document). All numbers are little-endian.

Shape legend: D documents of a split, D1 = D + 1; T tokens of a document.
"""

import hashlib
import json
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.tokenizer import Vocab, load_tokenizer
from bertsmith.errors import UserError

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
Split = Literal["train", "valid"]
KINDS = ("tokens", "offsets", "words", "places")
HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard, mapped."""

    tokens: NDArray[Any]
    offsets_D1: NDArray[np.int64]
    word_bits: NDArray[np.uint8]
    places_D2: NDArray[np.uint32]


class TokenCorpus:
    """The documents of one split, numbered from 0 across its shards."""

    def __init__(
        self, shards: list[Shard], *, vocab: Vocab, inputs: list[str], fingerprint: str
    ) -> None:
        """Join shards, whose files stay mapped.

        Args:
            shards: In order.
            vocab: Of the ids.
            inputs: Names of the files that the places count.
            fingerprint: Of the content.
        """
        self._shards, self._inputs = shards, inputs
        self._firsts = [0]
        for shard in shards:
            self._firsts.append(self._firsts[-1] + len(shard.offsets_D1) - 1)
        self.vocab = vocab
        self.fingerprint = fingerprint
        """Changes when a token, the order of documents or the tokenizer changes."""

        self.lengths_D: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(s.offsets_D1) for s in shards)]
        )
        """Tokens of each document, without special ones."""

    @property
    def num_documents(self) -> int:
        """Documents."""
        return self._firsts[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens, without special ones."""
        return sum(len(shard.tokens) for shard in self._shards)

    def document(self, index: int) -> NDArray[Any]:
        """Ids of a document without special tokens: a read-only view."""
        shard, local = self._find(index)
        return shard.tokens[shard.offsets_D1[local] : shard.offsets_D1[local + 1]]

    def word_starts(self, index: int) -> NDArray[np.bool_]:
        """For each token of a document, whether it begins a word."""
        shard, local = self._find(index)
        start, end = int(shard.offsets_D1[local]), int(shard.offsets_D1[local + 1])
        first = start // 8
        bits = np.unpackbits(shard.word_bits[first : -(-end // 8)], bitorder="little")
        return bits[start - first * 8 : end - first * 8].astype(np.bool_)

    def name_of(self, index: int) -> str:
        """Where a document comes from: ``file:line``, for messages."""
        shard, local = self._find(index)
        file, line = shard.places_D2[local].tolist()
        return f"{self._inputs[file]}:{line}"

    def _find(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect_right(self._firsts, index) - 1
        return self._shards[number], index - self._firsts[number]


def open_shards(folder: Path, split: Split, *, verify: bool = True) -> TokenCorpus:
    """Open one split of a prepared folder.

    Args:
        folder: What `bertsmith prepare` wrote.
        split: Which documents.
        verify: Whether to compare the files with their hashes, at about the disk's speed.

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
    shards = [_open_shard(folder / split, n, ids) for n in range(manifest["shards"][split])]
    for number, shard in enumerate(shards):
        if len(shard.offsets_D1) < 1 or int(shard.offsets_D1[-1]) != len(shard.tokens):
            raise UserError(f"{folder / split}: shard {number} is inconsistent; prepare again")
    return TokenCorpus(
        shards,
        vocab=vocab,
        inputs=[entry["path"] for entry in manifest["inputs"]],
        fingerprint=_fingerprint(vocab, mine),
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

    def check(name: str) -> None:
        path, entry = folder / name, files[name]
        try:
            size = path.stat().st_size
            found = sha256_of(path) if verify and size == entry["bytes"] else entry["sha256"]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; prepare again") from error
        if size != entry["bytes"]:
            raise UserError(
                f"{path}: damaged shard: {size:,} bytes where the manifest says "
                f"{entry['bytes']:,} (sha256 {entry['sha256']}); prepare again"
            )
        if found != entry["sha256"]:
            raise UserError(
                f"{path}: damaged shard: sha256 {found} where the manifest says "
                f"{entry['sha256']}; prepare again"
            )

    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
        for _ in pool.map(check, sorted(files)):
            pass


def _open_shard(folder: Path, number: int, ids: np.dtype[Any]) -> Shard:
    dtypes: tuple[np.dtype[Any], ...] = (ids, np.dtype("<i8"), np.dtype("u1"), np.dtype("<u4"))
    tokens, offsets, words, places = (
        _mapped(folder / f"{kind}-{number:05}.bin", dtype)
        for kind, dtype in zip(KINDS, dtypes, strict=True)
    )
    return Shard(
        tokens=tokens, offsets_D1=offsets, word_bits=words, places_D2=places.reshape(-1, 2)
    )


def _mapped(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if file.stat().st_size == 0:  # nothing to map
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _fingerprint(vocab: Vocab, files: dict[str, dict[str, Any]]) -> str:
    lines = [vocab.fingerprint, *(f"{name} {files[name]['sha256']}" for name in sorted(files))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
