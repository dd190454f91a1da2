"""A corpus in memory, as small as a test wants it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.tokenizer import Vocab

VOCAB = Vocab(
    size=1000,
    pad_id=0,
    unk_id=1,
    cls_id=2,
    sep_id=3,
    mask_id=4,
    special_ids=(0, 1, 2, 3, 4),
    fingerprint="",
)


class ListCorpus:
    """Documents of given lengths; token k of document d is told by both."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths_D: NDArray[np.int64] = np.array(lengths, np.int64)
        self.vocab = VOCAB

    @property
    def num_documents(self) -> int:
        return len(self.lengths_D)

    def document(self, index: int, /) -> NDArray[np.int64]:
        return 5 + (index * 37 + np.arange(self.lengths_D[index])) % 995


def skewed_lengths(count: int) -> list[int]:
    """Lengths like those of real paragraphs: most short, some very long."""
    rng = np.random.default_rng(3)
    lengths: list[int] = np.clip(rng.lognormal(3.9, 1.1, count), 1, 3000).astype(int).tolist()
    return lengths
