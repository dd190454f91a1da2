"""A corpus in memory, as small as a test wants it."""

from collections.abc import Sequence
from pathlib import Path

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

    def __init__(
        self, lengths: Sequence[int], *, folder: Path | None = None, fingerprint: str = ""
    ) -> None:
        self._lengths_D: NDArray[np.int64] = np.array(lengths, np.int64)
        self.folder, self.fingerprint = folder, fingerprint
        self.vocab = VOCAB
        self.asked: list[range] = []
        """Which lengths were asked for."""

    @property
    def num_documents(self) -> int:
        return len(self._lengths_D)

    @property
    def num_tokens(self) -> int:
        return int(self._lengths_D.sum())

    def lengths(self, first: int, stop: int, /) -> NDArray[np.int64]:
        self.asked.append(range(first, stop))
        return self._lengths_D[first:stop]

    def document(self, index: int, /) -> NDArray[np.int64]:
        return 5 + (index * 37 + np.arange(self._lengths_D[index])) % 995

    def word_starts(self, index: int, /) -> NDArray[np.bool_]:
        """Words of one to four tokens."""
        return (index * 7 + np.arange(self._lengths_D[index]) * 5) % 9 < 4


def skewed_lengths(count: int) -> list[int]:
    """Lengths like those of real paragraphs: most short, some very long."""
    rng = np.random.default_rng(3)
    lengths: list[int] = np.clip(rng.lognormal(3.9, 1.1, count), 1, 3000).astype(int).tolist()
    return lengths
