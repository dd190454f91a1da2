"""How often each position and each token type is predicted in training, and what never is.

What an epoch predicts follows from seed, epoch and document alone, so nothing is recorded while
training goes on and there is no state to save: the counts are found again for whatever steps have
been done, after a resumption as after any other start. They are those of a sample of documents of
about a given size (all of them where the text is no larger), which bounds memory and time.

Classic masking (`MaskingConfig.is_classic`) draws by pack. It is counted as if each document drew
for itself: the same chances, other draws.

Of an epoch that is not done, a piece counts from the step on that holds its first segment, if it is
cut in two (`data.pairs`).

Shape legend: T tokens of the sample, S its pieces, V token types.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.blocks import RUNS_OF_A_BLOCK, Blocks
from bertsmith.data.config import PackingConfig
from bertsmith.data.frequency import BUCKETS, TypeFrequencies
from bertsmith.data.pieces import Corpus, Pieces, is_inner, longest_piece
from bertsmith.data.stream import PretrainStream

SAMPLE_TOKENS = 1 << 20
"""About the most tokens whose predictions are counted while training goes on."""

PIECES_AT_ONCE = 1024
MOST_COUNTED = int(np.iinfo(np.uint16).max)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What some steps of training have predicted of the sample."""

    epochs: float
    """Passes over the text."""

    sample_tokens: int
    """Positions that may be predicted, in the sample."""

    sample_share: float
    """Of the text's tokens, how many are in the sample."""

    is_estimate: bool
    """Whether draws are like those of training, but not the same."""

    counts: dict[int, int]
    """How many positions were predicted so often, by how often."""

    occurrences_V: NDArray[np.int64]
    """How often each type stands in the sample where it may be predicted."""

    predicted_V: NDArray[np.int64]
    """How often each type was predicted."""

    never_V: NDArray[np.int64]
    """How many positions of each type never were."""

    bucket_V: NDArray[np.int8]

    @property
    def never_predicted_share(self) -> float:
        """Of the positions."""
        return self.counts.get(0, 0) / max(self.sample_tokens, 1)

    @property
    def types_never_predicted(self) -> int:
        """Types that occur, and were never predicted."""
        return int(np.count_nonzero((self.occurrences_V > 0) & (self.predicted_V == 0)))

    def least_trained(self, most: int) -> list[int]:
        """The ids predicted least often of those that occur; of equals the more frequent first."""
        ids = np.flatnonzero(self.occurrences_V)
        order = np.lexsort((ids, -self.occurrences_V[ids], self.predicted_V[ids]))
        found: list[int] = ids[order[:most]].tolist()
        return found

    def by_frequency(self) -> dict[str, dict[str, float]]:
        """For each bucket (`data.frequency`): its types, their tokens, and what became of them."""
        table = {}
        for number, name in enumerate(BUCKETS):
            mine = (self.bucket_V == number) & (self.occurrences_V > 0)
            tokens, predicted, never = (
                int(counts_V[mine].sum())
                for counts_V in (self.occurrences_V, self.predicted_V, self.never_V)
            )
            table[name] = {
                "types": int(mine.sum()),
                "types_never_predicted": int(np.count_nonzero(self.predicted_V[mine] == 0)),
                "tokens": tokens,
                "predictions": predicted,
                "predictions_per_token": predicted / max(tokens, 1),
                "never_predicted_share": never / max(tokens, 1),
            }
        return table

    def as_json(self) -> dict[str, Any]:
        """The report, without the tables by type."""
        return {
            "epochs": round(self.epochs, 4),
            "sample_tokens": self.sample_tokens,
            "sample_share": self.sample_share,
            "is_estimate": self.is_estimate,
            "never_predicted_share": self.never_predicted_share,
            "min_count": min(self.counts, default=0),
            "max_count": max(self.counts, default=0),
            "positions_by_count": {str(count): n for count, n in sorted(self.counts.items())},
            "types": int(np.count_nonzero(self.occurrences_V)),
            "types_never_predicted": self.types_never_predicted,
            "by_frequency": self.by_frequency(),
        }


class CoverageCounter:
    """Counts the predictions of a sample of documents, epoch by epoch."""

    def __init__(
        self,
        stream: PretrainStream,
        corpus: Corpus,
        frequencies: TypeFrequencies,
        *,
        packing: PackingConfig,
        is_estimate: bool,
        sample_tokens: int = SAMPLE_TOKENS,
    ) -> None:
        """Choose the sample: documents from evenly spread places of the corpus.

        Args:
            stream: What is trained on.
            corpus: The documents behind it.
            frequencies: Of the types in the whole text.
            packing: Of the stream.
            is_estimate: Whether its masking is classic.
            sample_tokens: About the most tokens in the sample.
        """
        self._stream, self._frequencies = stream, frequencies
        self._is_estimate = is_estimate
        num_documents = corpus.num_documents
        num_samples = max(min(-(-corpus.num_tokens // sample_tokens), num_documents), 1)
        runs = min(RUNS_OF_A_BLOCK, num_documents // num_samples) if num_samples > 1 else 1
        sampled = Blocks(num_documents=num_documents, num_blocks=num_samples, runs_of_a_block=runs)
        self._pieces = Pieces(
            corpus,
            max_sequence_tokens=longest_piece(packing, stream.objective),
            runs=sampled.runs_of(0),
        )
        inner_S = self._pieces.lengths_S.astype(np.int64) - 2
        self._starts_S1 = np.concatenate([[0], np.cumsum(inner_S)])
        num_tokens = int(self._starts_S1[-1])
        self._sample_share = num_tokens / max(corpus.num_tokens, 1)
        self._ids_T = np.empty(num_tokens, np.int32)
        for pieces_S in self._chunks():
            ids_T, starts = self._pieces.lay(pieces_S)
            self._ids_T[self._span(pieces_S)] = ids_T[is_inner(starts)]
        self._counts_T = np.zeros(num_tokens, np.uint16)
        self._epochs_counted = 0
        self._latest: Coverage | None = None

    def whole_epochs(self, step: int) -> Coverage | None:
        """The coverage after the epochs that are done before a step; None before the first one."""
        epoch, _ = self._stream.epoch_of(step)
        self._count_epochs(epoch)
        if self._latest is None and epoch:
            self._latest = self._told(self._counts_T, epochs=float(epoch))
        return self._latest

    def after(self, steps: int) -> Coverage:
        """The coverage after so many steps from the start."""
        epoch, step_of_epoch = self._stream.epoch_of(steps)
        self._count_epochs(epoch)
        counts_T = self._counts_T
        if step_of_epoch:
            counts_T = counts_T.copy()
            first = epoch * self._stream.steps_in_epoch(epoch)
            seen_S = self._seen_in(range(first, steps))
            for pieces_S in self._chunks():
                self._count(counts_T, pieces_S[seen_S[pieces_S]], epoch)
        return self._told(counts_T, epochs=steps / self._stream.steps_in_epoch(0))

    def _count_epochs(self, epochs: int) -> None:
        if epochs == self._epochs_counted:
            return
        self._latest = None
        if epochs < self._epochs_counted:  # the run went back
            self._counts_T[:] = 0
            self._epochs_counted = 0
        for epoch in range(self._epochs_counted, epochs):
            for pieces_S in self._chunks():
                self._count(self._counts_T, pieces_S, epoch)
        self._epochs_counted = epochs

    def _count(self, counts_T: NDArray[np.uint16], pieces_S: NDArray[np.int64], epoch: int) -> None:
        if len(pieces_S) == 0:
            return
        predicted = self._stream.predicted_of(self._pieces, pieces_S, epoch=epoch)
        lengths_S = self._starts_S1[pieces_S + 1] - self._starts_S1[pieces_S]
        shift_S = self._starts_S1[pieces_S] - (np.cumsum(lengths_S) - lengths_S)
        places = np.flatnonzero(predicted) + np.repeat(shift_S, lengths_S)[predicted]
        counts_T[places[counts_T[places] < MOST_COUNTED]] += 1

    def _seen_in(self, steps: range) -> NDArray[np.bool_]:
        """Which pieces of the sample the steps train on."""
        all_S = np.arange(self._pieces.num_pieces)
        keys_S = _key(self._pieces.documents_of(all_S), self._pieces.first_tokens_of(all_S))
        seen_S = np.zeros(len(all_S), np.bool_)
        for step in steps:
            for documents, firsts in self._stream.origins_of(step):
                keys = _key(documents, firsts)
                places = np.searchsorted(keys_S, keys)  # ascending, as pieces are in the corpus
                places = np.minimum(places, len(keys_S) - 1)
                seen_S[places[keys_S[places] == keys]] = True
        return seen_S

    def _told(self, counts_T: NDArray[np.uint16], *, epochs: float) -> Coverage:
        counts_V, bucket_V = self._frequencies.counts_V, self._frequencies.bucket_V
        may_be_T = bucket_V[self._ids_T] >= 0
        ids, counts = self._ids_T[may_be_T], counts_T[may_be_T]
        num_types = len(counts_V)
        found, how_many = np.unique(counts, return_counts=True)
        return Coverage(
            epochs=epochs,
            sample_tokens=len(ids),
            sample_share=self._sample_share,
            is_estimate=self._is_estimate,
            counts=dict(zip(found.tolist(), how_many.tolist(), strict=True)),
            occurrences_V=np.bincount(ids, minlength=num_types),
            predicted_V=np.bincount(ids, counts, minlength=num_types).astype(np.int64),
            never_V=np.bincount(ids[counts == 0], minlength=num_types),
            bucket_V=bucket_V,
        )

    def _chunks(self) -> Iterator[NDArray[np.int64]]:
        for first in range(0, self._pieces.num_pieces, PIECES_AT_ONCE):
            yield np.arange(first, min(first + PIECES_AT_ONCE, self._pieces.num_pieces))

    def _span(self, pieces_S: NDArray[np.int64]) -> slice:
        """Where pieces that follow each other lie in the sample."""
        return slice(int(self._starts_S1[pieces_S[0]]), int(self._starts_S1[pieces_S[-1] + 1]))


def _key(documents: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for a piece: no document has 2^31 tokens."""
    keys: NDArray[np.int64] = documents.astype(np.int64) << 31 | firsts
    return keys
