"""A corpus of any size that takes no room: the length of a document follows from its number."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bertsmith.data import assembly, blocks, shards
from bertsmith.data.tokenizer import Vocab, load_tokenizer

RUN_DOCUMENTS = 1 << 11
"""Documents of a run (`data.blocks`). Each run has the same lengths in an order of its own, so all
blocks have as many packs, and the note of their counts can be made without planning each."""

MEAN_TOKENS = blocks.BLOCK_TOKENS // blocks.RUNS_OF_A_BLOCK // RUN_DOCUMENTS  # 128
VOCAB = Vocab(
    size=30522,
    pad_id=0,
    unk_id=1,
    cls_id=2,
    sep_id=3,
    mask_id=4,
    special_ids=(0, 1, 2, 3, 4),
    fingerprint="",
)


class MadeUpCorpus:
    """Some blocks of documents whose lengths are spread like those of paragraphs."""

    def __init__(self, *, num_blocks: int, folder: Path | None) -> None:
        """Nothing is computed but one table of lengths."""
        self.num_documents = num_blocks * blocks.RUNS_OF_A_BLOCK * RUN_DOCUMENTS
        self.num_tokens = num_blocks * blocks.BLOCK_TOKENS
        self.vocab, self.folder, self.fingerprint = VOCAB, folder, f"{num_blocks} made-up blocks"
        self.lengths_asked = 0
        self._table = _table()

    def lengths(self, first: int, stop: int, /) -> NDArray[np.int64]:
        """Tokens of some documents."""
        self.lengths_asked += stop - first
        numbers = np.arange(first, stop)
        # An odd factor and a shift permute each run's numbers.
        places = (numbers * 40503 + numbers // RUN_DOCUMENTS * 9973) % RUN_DOCUMENTS
        lengths: NDArray[np.int64] = self._table[places]
        return lengths

    def document(self, index: int, /) -> NDArray[np.int64]:
        """Ids that follow from the number too."""
        length = int(self.lengths(index, index + 1)[0])
        return 5 + (index * 37 + np.arange(length)) % (VOCAB.size - 5)

    def word_starts(self, index: int, /) -> NDArray[np.bool_]:
        """Every token is a word."""
        return np.ones(len(self.document(index)), np.bool_)


def write_hollow_shards(folder: Path, tokenizer: Path, *, num_tokens: int) -> int:
    """A prepared folder whose files have their sizes but no content; returns its shards.

    It can be opened, which is what it is for, and not read.
    """
    num_shards = -(-num_tokens // assembly.SHARD_TOKENS)
    tokens = assembly.SHARD_TOKENS
    documents = tokens // MEAN_TOKENS
    sizes = {
        "tokens": 2 * tokens,
        "offsets": 8 * (documents + 1),
        "words": tokens // 8,
        "places": 8 * documents,
    }
    (folder / "train").mkdir(parents=True)
    shutil.copytree(tokenizer, folder / "tokenizer")
    files = {}
    for number in range(num_shards):
        for kind, size in sizes.items():
            name = f"train/{kind}-{number:05}.bin"
            with (folder / name).open("wb") as file:
                os.truncate(file.fileno(), size)
            files[name] = {"bytes": size, "sha256": f"{number:064x}"}
    manifest = {
        "schema": shards.SCHEMA,
        "tokenizer": {"fingerprint": load_tokenizer(tokenizer).vocab.fingerprint},
        "token_dtype": "uint16",
        "shards": {"train": num_shards, "valid": 0},
        "files": files,
        "inputs": [],
    }
    (folder / shards.MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return num_shards


def _table() -> NDArray[np.int64]:
    """Lengths of mean `MEAN_TOKENS`, exactly."""
    rng = np.random.default_rng(0)
    table = np.clip(rng.lognormal(4.35, 1.0, RUN_DOCUMENTS), 2, 3000).astype(np.int64)
    missing = MEAN_TOKENS * RUN_DOCUMENTS - int(table.sum())
    table += missing // RUN_DOCUMENTS
    table = np.maximum(table, 1)
    short = MEAN_TOKENS * RUN_DOCUMENTS - int(table.sum())
    largest = np.argsort(-table, kind="stable")[: abs(short)]
    table[largest] += np.sign(short)
    assert int(table.sum()) == MEAN_TOKENS * RUN_DOCUMENTS, table.sum()
    return table
