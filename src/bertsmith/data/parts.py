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

from bertsmith.data.compressed import COMPRESSED_ENDINGS
from bertsmith.data.corpus import PARQUET_ENDINGS, ReadOptions, read_documents
from bertsmith.data.plan import Unit
from bertsmith.data.tokenizer import continues_word, load_tokenizer
from bertsmith.data.words import cutter_of, is_unspaced, word_starts
from bertsmith.data.writing import writing_error
from bertsmith.durable import flush
from bertsmith.errors import UserError

DOCUMENT = np.dtype(
    [("hash_high", "<u8"), ("hash_low", "<u8"), ("tokens", "<i8"), ("file", "<u4"), ("line", "<u4")]
)
"""What is known of each document of a part."""

PART_FILES = ("tokens.bin", "words.bin", "documents.bin", "counts.json")
BATCH_CHARACTERS = 1 << 19
PIECE_CHARACTERS = 1 << 18
"""A longer document is tokenised in pieces that end at white space; the ids are the same."""

PACKED_RATIO = 4.0
"""Bytes of text in a byte of a compressed file, for an estimate."""

RESULT_RATIO = 0.75
"""Bytes of the result for a byte of parts, for an estimate: word starts become bits there."""


def part_folder(work: Path, unit: Unit, fingerprint: str) -> Path:
    """Where the part of a unit lies; names all that it depends on."""
    key = hashlib.sha256(f"{unit.key} {fingerprint}".encode()).hexdigest()
    return work / f"part-{unit.number:06}-{key[:16]}"


def bytes_needed(units: list[Unit], work: Path, fingerprint: str, *, with_result: bool) -> int:
    """About how much is still to be written: the parts that are missing, and the result of all.

    The parts that are there say how large one becomes; without any, as large as its text.

    Args:
        units: Whose parts are wanted.
        work: Folder of parts.
        fingerprint: Of the tokenizer.
        with_result: Whether the result is made of them on the same disk.
    """
    made_bytes = made_text = missing_text = 0.0
    for unit in units:
        folder = part_folder(work, unit, fingerprint)
        if folder.is_dir():
            made_text += _text_bytes(unit)
            made_bytes += sum(file.stat().st_size for file in folder.iterdir())
        else:
            missing_text += _text_bytes(unit)
    ratio = made_bytes / made_text if made_text else 1.0
    result = RESULT_RATIO * ratio * (made_text + missing_text) if with_result else 0.0
    return round(ratio * missing_text + result)


def _text_bytes(unit: Unit) -> float:
    packed = (*COMPRESSED_ENDINGS, *PARQUET_ENDINGS)
    return sum(
        size * (PACKED_RATIO if span.path.lower().endswith(packed) else 1.0)
        for span, size in zip(unit.spans, unit.span_bytes, strict=True)
    )


def described(unit: Unit) -> str:
    """What a unit reads, for messages."""
    first, more = unit.spans[0], len(unit.spans) - 1
    return (
        f"part {unit.number + 1:,}, {first.path} from byte {first.start:,} (line "
        f"{first.first_line:,})" + (f" and {more:,} more" if more else "")
    )


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
        self._cut_chinese = cutter_of(read.chinese_words)
        self._read = read
        self._place = ""

    def make(self, work: Path, unit: Unit, advance: Callable[[int], None]) -> None:
        """Write the part of a unit, unless it is there.

        Args:
            work: Folder of parts.
            unit: What to read.
            advance: Told each stretch of bytes that was read, on disk.

        Raises:
            UserError: A document cannot be read, or there is too little memory.
            WritingError: Nothing can be written.
        """
        folder = part_folder(work, unit, self._fingerprint)
        if folder.is_dir():
            advance(sum(unit.span_bytes))
            return
        fresh = work / f"{folder.name}.tmp-{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        self._place = described(unit)
        try:
            fresh.mkdir(parents=True)
            self._write(fresh, unit, advance)
            flush(fresh)
            put_in_place(fresh, folder)
        except OSError as error:  # of writing: those of reading are a `UserError` by now
            raise writing_error(error, fresh, self._place) from error
        except MemoryError as error:
            raise UserError(
                f"{self._place}: out of memory; what is finished is kept: run again with fewer "
                "--workers"
            ) from error
        except Exception as error:
            error.add_note(f"at {self._place}")
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _write(self, folder: Path, unit: Unit, advance: Callable[[int], None]) -> None:
        rows: list[NDArray[Any]] = []
        bad = empty = 0
        with (folder / "tokens.bin").open("wb") as ids, (folder / "words.bin").open("wb") as words:
            for texts, places, skipped in _batches(unit, self._read, advance):
                bad += skipped
                if places:
                    file, line = places[0]
                    path = unit.spans[unit.file_numbers.index(file)].path
                    self._place = f"part {unit.number + 1:,}, documents from {path}:{line}"
                lengths = self._encode(texts, ids, words)
                made = np.zeros(len(texts), DOCUMENT)
                made["tokens"] = lengths
                made["hash_high"], made["hash_low"] = _hashes(texts)
                made["file"], made["line"] = np.array(places, np.uint32).reshape(-1, 2).T
                empty += int(np.count_nonzero(made["tokens"] == 0))
                rows.append(made[made["tokens"] > 0])
        (folder / "documents.bin").write_bytes(
            np.concatenate([np.zeros(0, DOCUMENT), *rows]).tobytes()
        )
        (folder / "counts.json").write_text(json.dumps({"bad": bad, "empty": empty}))
        for name in PART_FILES:
            flush(folder / name)

    def _encode(self, texts: list[str], ids: BinaryIO, words: BinaryIO) -> list[int]:
        """Append ids and word starts to the files; return the number of tokens of each text."""
        pieces = [piece for text in texts for piece in _pieces(text)]
        flat: list[int] = []
        starts: NDArray[np.bool_]
        lengths: list[int] = []
        unspaced = [number for number, piece in enumerate(pieces) if is_unspaced(piece)]
        # Where nothing asks for the place of each token in the text, the library is faster.
        may_be_fast = self._continues is not None and not unspaced
        encode = self._tokenizer.encode_batch_fast if may_be_fast else self._tokenizer.encode_batch
        encodings = encode(pieces, add_special_tokens=False)
        word_numbers: list[int | None] = []
        for encoding in encodings:
            flat += encoding.ids
            lengths.append(len(encoding))
            if self._continues is None:
                word_numbers += [-1, *encoding.word_ids]  # a piece begins a word
        tokens = np.array(flat, self._dtype)
        if self._continues is not None:
            starts = ~self._continues[tokens]
        else:
            numbers = np.array([-2 if w is None else w for w in word_numbers], np.int64)
            starts = np.diff(numbers, prepend=-3)[numbers != -1] != 0
        ends = np.cumsum(lengths)
        for number in unspaced:
            here = slice(int(ends[number]) - lengths[number], int(ends[number]))
            starts[here] = word_starts(
                pieces[number], encodings[number].offsets, starts[here], self._cut_chinese
            )
        # Not `tofile`: of a full disk it says nothing when the array is small.
        ids.write(tokens.data)
        words.write(starts.astype(np.uint8).data)
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
