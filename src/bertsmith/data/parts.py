"""Text to token ids: one unit of work becomes one part, a folder that is whole or absent.

A part still holds every document, duplicates too, with a hash of each: which of them stay and in
which split is decided when all parts are there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bertsmith.data.corpus import ReadOptions, read_documents
from bertsmith.data.plan import Unit
from bertsmith.data.tokenizer import continues_word, load_tokenizer
from bertsmith.errors import UserError

DOCUMENT = np.dtype(
    [("hash_high", "<u8"), ("hash_low", "<u8"), ("tokens", "<i8"), ("file", "<u4"), ("line", "<u4")]
)
"""What is known of each document of a part."""

BATCH_CHARACTERS = 1 << 19
PIECE_CHARACTERS = 1 << 18
"""A longer document is tokenised in pieces that end at white space; the ids are the same."""


def part_folder(work: Path, unit: Unit, fingerprint: str) -> Path:
    """Where the part of a unit lies; names all that it depends on."""
    key = hashlib.sha256(f"{unit.key} {fingerprint}".encode()).hexdigest()
    return work / f"part-{unit.number:06}-{key[:16]}"


def put_in_place(fresh: Path, folder: Path) -> None:
    """Give a whole folder its name, unless another machine was faster: then it is deleted.

    Raises:
        OSError: It cannot be renamed, and no other is there.
    """
    try:
        fresh.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(fresh, ignore_errors=True)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id, on disk."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, kw_only=True)
class PartCounts:
    """What a part left out."""

    bad: int
    """Documents that are not UTF-8."""

    empty: int
    """Documents without a token."""


class PartMaker:
    """Tokenises units with one tokenizer."""

    def __init__(self, tokenizer_folder: Path, read: ReadOptions) -> None:
        loaded = load_tokenizer(tokenizer_folder)
        self._tokenizer: Tokenizer = loaded.tokenizer
        self._tokenizer.encode_special_tokens = True  # "[MASK]" in a text is a text
        self._fingerprint = loaded.vocab.fingerprint
        self._dtype = token_dtype(loaded.vocab.size)
        self._continues = continues_word(loaded.tokenizer)
        self._read = read

    def make(self, work: Path, unit: Unit, advance: Callable[[int], None]) -> None:
        """Write the part of a unit, unless it is there.

        Args:
            work: Folder of parts.
            unit: What to read.
            advance: Told each stretch of bytes that was read, on disk.

        Raises:
            UserError: A document cannot be read.
            OSError: Nothing can be written.
        """
        folder = part_folder(work, unit, self._fingerprint)
        if folder.is_dir():
            advance(sum(unit.span_bytes))
            return
        fresh = work / f"{folder.name}.tmp-{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            self._write(fresh, unit, advance)
            put_in_place(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _write(self, folder: Path, unit: Unit, advance: Callable[[int], None]) -> None:
        rows: list[NDArray[Any]] = []
        bad = empty = 0
        with (folder / "tokens.bin").open("wb") as ids, (folder / "words.bin").open("wb") as words:
            for texts, places, skipped in _batches(unit, self._read, advance):
                bad += skipped
                lengths = self._encode(texts, ids, words)
                made = np.zeros(len(texts), DOCUMENT)
                made["tokens"] = lengths
                made["hash_high"], made["hash_low"] = _hashes(texts)
                made["file"], made["line"] = np.array(places, np.uint32).reshape(-1, 2).T
                empty += int(np.count_nonzero(made["tokens"] == 0))
                rows.append(made[made["tokens"] > 0])
        np.concatenate([np.zeros(0, DOCUMENT), *rows]).tofile(folder / "documents.bin")
        (folder / "counts.json").write_text(json.dumps({"bad": bad, "empty": empty}))

    def _encode(self, texts: list[str], ids: BinaryIO, words: BinaryIO) -> list[int]:
        """Append ids and word starts to the files; return the number of tokens of each text."""
        pieces = [piece for text in texts for piece in _pieces(text)]
        flat: list[int] = []
        starts: NDArray[np.bool_]
        lengths: list[int] = []
        if self._continues is not None:
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            for encoding in encodings:
                flat += encoding.ids
                lengths.append(len(encoding))
            tokens = np.array(flat, self._dtype)
            starts = ~self._continues[tokens]
        else:
            word_numbers: list[int | None] = []
            for encoding in self._tokenizer.encode_batch(pieces, add_special_tokens=False):
                flat += encoding.ids
                word_numbers += [-1, *encoding.word_ids]  # a piece begins a word
                lengths.append(len(encoding))
            tokens = np.array(flat, self._dtype)
            numbers = np.array([-2 if w is None else w for w in word_numbers], np.int64)
            starts = np.diff(numbers, prepend=-3)[numbers != -1] != 0
        tokens.tofile(ids)
        starts.astype(np.uint8).tofile(words)
        if len(pieces) == len(texts):
            return lengths
        counts = iter(lengths)
        return [sum(next(counts) for _ in _pieces(text)) for text in texts]


def read_part(folder: Path, dtype: np.dtype[Any]) -> "Part":
    """Map a part.

    Raises:
        UserError: It is damaged.
    """
    try:
        counts = PartCounts(**json.loads((folder / "counts.json").read_text()))
        documents = np.fromfile(folder / "documents.bin", DOCUMENT)
        tokens, words = (
            _mapped(folder / n, d) for n, d in (("tokens.bin", dtype), ("words.bin", "u1"))
        )
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder}: damaged ({error}); delete it and prepare again") from error
    if not int(documents["tokens"].sum()) == len(tokens) == len(words):
        raise UserError(f"{folder}: damaged (sizes do not agree); delete it and prepare again")
    return Part(documents=documents, tokens=tokens, words=words, counts=counts)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part, mapped."""

    documents: NDArray[Any]
    tokens: NDArray[Any]
    words: NDArray[np.uint8]
    """1 where a token begins a word."""

    counts: PartCounts


def _mapped(file: Path, dtype: Any) -> NDArray[Any]:
    if file.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _batches(
    unit: Unit, read: ReadOptions, advance: Callable[[int], None]
) -> Iterator[tuple[list[str], list[tuple[int, int]], int]]:
    """Texts with their (file, line), and how many were skipped on the way."""
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    size = skipped = 0
    for span, file, span_bytes in zip(unit.spans, unit.file_numbers, unit.span_bytes, strict=True):
        told = 0
        for document in read_documents(span, read):
            skipped += document.is_bad
            if not document.is_bad:
                texts.append(document.text)
                places.append((file, document.line))
                size += len(document.text)
            if size >= BATCH_CHARACTERS:
                yield texts, places, skipped
                texts, places, size, skipped = [], [], 0, 0
                done = min(max(document.packed_bytes - span.start, told), span_bytes)
                advance(done - told)
                told = done
        advance(span_bytes - told)
    yield texts, places, skipped


def _pieces(text: str) -> Iterator[str]:
    """The text, or pieces of a long one that begin at white space."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        cut = max(text.rfind(space, start + 1, end) for space in (" ", "\n"))
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]


def _hashes(texts: list[str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """128 bits of each text: equal texts, and no others, are equal."""
    digests = b"".join(hashlib.blake2b(t.encode(), digest_size=16).digest() for t in texts)
    pairs = np.frombuffer(digests, "<u8").reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
