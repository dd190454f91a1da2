"""The text both sides of a benchmark train on: the same documents, tokenised once."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MIN_TOKENS = 8
"""Shorter documents are left out, as run_mlm-like scripts do."""


def write_documents(
    texts: list[Path], tokenizer_folder: Path, output: Path, *, num_documents: int, seed: int
) -> int:
    """Tokenise a fixed random sample of the blank-line paragraphs of some files; returns tokens."""
    paragraphs = [p for path in texts for p in _paragraphs(path)]
    order = np.random.default_rng(seed).permutation(len(paragraphs))
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    documents: list[NDArray[np.int32]] = []
    for start in range(0, len(order), 1000):
        batch = [paragraphs[i] for i in order[start : start + 1000]]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            if len(encoding.ids) >= MIN_TOKENS:
                documents.append(np.array(encoding.ids, dtype=np.int32))
        if len(documents) >= num_documents:
            break
    documents = documents[:num_documents]
    lengths = np.array([len(d) for d in documents], dtype=np.int64)
    np.savez(output, tokens=np.concatenate(documents), lengths=lengths)
    return int(lengths.sum())


def read_documents(path: str | Path) -> list[NDArray[np.int32]]:
    """Token ids of each document, without special tokens."""
    with np.load(path, allow_pickle=False) as arrays:
        return np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])


def _paragraphs(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        yield from (p for p in file.read().split("\n\n") if p.strip())
