"""Documents cut to fit: which part of which document a piece is.

Shape legend: D documents, D1 = D + 1; R runs of documents, R1 = R + 1; S pieces; T tokens of a
sequence.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import PackedBatch
from bertsmith.data.config import SHORTEST_PAIR, Objective, PackingConfig, has_pairs
from bertsmith.data.masking import MaskingVocab

NUM_SPECIAL_TOKENS = 2  # [CLS] before a piece, [SEP] after it


class SequenceVocab(MaskingVocab, Protocol):
    """What building sequences asks of a vocabulary."""

    @property
    def cls_id(self) -> int:
        """Id of [CLS]."""

    @property
    def sep_id(self) -> int:
        """Id of [SEP]."""


class Corpus(Protocol):
    """Documents as token ids; `data.shards.TokenCorpus` is one."""

    @property
    def num_documents(self) -> int:
        """Documents, numbered from 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, special ones not counted; known without reading them."""

    @property
    def fingerprint(self) -> str:
        """Changes when a token or the order of the documents changes."""

    @property
    def folder(self) -> Path | None:
        """Where what has been found out about the corpus may be kept; None: nowhere."""

    @property
    def vocab(self) -> SequenceVocab:
        """The vocabulary of the ids."""

    def lengths(self, first: int, stop: int, /) -> NDArray[np.signedinteger]:
        """Tokens of the documents from `first` to before `stop`, special ones not counted."""

    def document(self, index: int, /) -> NDArray[np.integer]:
        """Ids of one document, without special tokens."""

    def word_starts(self, index: int, /) -> NDArray[np.bool_]:
        """For each token of a document, whether it begins a word.

        Raises:
            UserError: It was never noted.
        """


class Pieces:
    """The documents of a corpus, or of some runs of it, long ones cut into pieces.

    A document too long for one sequence is cut into the fewest pieces that fit, as equal as can
    be. Filling each piece to the brim would leave a rest of any size, down to a word with no
    context to be predicted from; equal pieces are never under half the maximum, and cost less
    attention. An empty document gives no piece.
    """

    def __init__(
        self, corpus: Corpus, *, max_sequence_tokens: int, runs: Sequence[range] | None = None
    ) -> None:
        """Read the lengths of the documents, and nothing else.

        Args:
            corpus: Where the documents are.
            max_sequence_tokens: Longest piece, special tokens included.
            runs: Which documents, as ascending ranges; None means all.
        """
        self._corpus = corpus
        self._room = max_sequence_tokens - NUM_SPECIAL_TOKENS
        runs = [range(corpus.num_documents)] if runs is None else runs
        self._run_starts_R = np.array([run.start for run in runs], np.int64)
        self._places_R1 = np.cumsum([0, *(len(run) for run in runs)], dtype=np.int64)
        lengths_D = np.concatenate(
            [np.zeros(0, np.int64), *(corpus.lengths(run.start, run.stop) for run in runs)]
        )
        self._lengths_D = lengths_D.astype(np.int32)
        counts_D = -(-lengths_D // self._room)
        self._firsts_D1 = np.zeros(len(lengths_D) + 1, np.int64)
        np.cumsum(counts_D, out=self._firsts_D1[1:])
        self.lengths_S = self._all_lengths(lengths_D, counts_D)
        """Tokens of each piece, its two special tokens included, int32."""

    @property
    def num_pieces(self) -> int:
        """Pieces, numbered from 0 in the order of the corpus."""
        return len(self.lengths_S)

    def documents_of(self, pieces_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The document each piece is from, by its number in the corpus."""
        return self._documents_at(self._places_of(pieces_S))

    def pieces_of(self, document: int) -> range:
        """The pieces of a document of these runs."""
        run = int(np.searchsorted(self._run_starts_R, document, side="right")) - 1
        place = int(self._places_R1[run]) + document - int(self._run_starts_R[run])
        return range(int(self._firsts_D1[place]), int(self._firsts_D1[place + 1]))

    def lay(self, pieces_S: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences of the pieces end to end, [CLS] ... [SEP] each.

        Returns:
            Their ids, and where each starts followed by the end of the last.
        """
        vocab = self._corpus.vocab
        starts = self._starts(pieces_S)
        ids_T = np.empty(int(starts[-1]), np.int64)
        ids_T[starts[:-1]] = vocab.cls_id
        ids_T[starts[1:] - 1] = vocab.sep_id
        for document, first, stop, start in self._stretches(pieces_S, starts):
            ids_T[start : start + stop - first] = self._corpus.document(document)[first:stop]
        return ids_T, starts

    def lay_word_starts(self, pieces_S: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each token that `lay` gives begins a word.

        Raises:
            UserError: It was never noted.
        """
        starts = self._starts(pieces_S)
        word_starts_T = np.ones(int(starts[-1]), np.bool_)
        for document, first, stop, start in self._stretches(pieces_S, starts):
            found = self._corpus.word_starts(document)[first:stop]
            word_starts_T[start : start + stop - first] = found
        return word_starts_T

    def numbers_of(self, pieces_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each piece among those of its document, from 0."""
        return pieces_S - self._firsts_D1[self._places_of(pieces_S)]

    def first_tokens_of(self, pieces_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each piece's first token in its document."""
        return np.array(
            [first for _, first, _, _ in self._stretches(pieces_S, self._starts(pieces_S))]
        )

    def _starts(self, pieces_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each piece starts when they lie end to end, and the end of the last."""
        starts = np.zeros(len(pieces_S) + 1, np.int64)
        np.cumsum(self.lengths_S[pieces_S], out=starts[1:])
        return starts

    def _stretches(
        self, pieces_S: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Document, first token, end there, and place of the first token when laid, of each."""
        places_S = self._places_of(pieces_S)
        rest_S = pieces_S - self._firsts_D1[places_S]
        counts_S = self._firsts_D1[places_S + 1] - self._firsts_D1[places_S]
        lengths_S = self._lengths_D[places_S]
        firsts_S = lengths_S * rest_S // counts_S
        stops_S = lengths_S * (rest_S + 1) // counts_S
        return zip(
            self._documents_at(places_S).tolist(),
            firsts_S.tolist(),
            stops_S.tolist(),
            (starts[:-1] + 1).tolist(),
            strict=True,
        )

    def pack(self, pieces_S: NDArray[np.int64]) -> PackedBatch:
        """A pack of the pieces, in the order given; at least one."""
        ids_T, starts = self.lay(pieces_S)
        lengths = np.diff(starts)
        return PackedBatch(
            input_ids_T=torch.from_numpy(ids_T),
            position_ids_T=torch.from_numpy(
                np.arange(len(ids_T)) - np.repeat(starts[:-1], lengths)
            ),
            segment_ids_T=torch.zeros(len(ids_T), dtype=torch.int64),
            starts_N1=torch.from_numpy(starts.astype(np.int32)),
            longest=int(lengths.max()),
        )

    def _places_of(self, pieces_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of each piece's document among those of the runs."""
        return np.searchsorted(self._firsts_D1, pieces_S, side="right") - 1

    def _documents_at(self, places_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers, in the corpus, of the documents at some places."""
        runs_S = np.searchsorted(self._places_R1, places_S, side="right") - 1
        return places_S - self._places_R1[runs_S] + self._run_starts_R[runs_S]

    def _all_lengths(
        self, lengths_D: NDArray[np.int64], counts_D: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Piece j of k holds tokens L*j//k to L*(j+1)//k of its document of L."""
        counts_S = np.repeat(counts_D, counts_D)
        numbers_S = np.arange(len(counts_S)) - np.repeat(self._firsts_D1[:-1], counts_D)
        tokens_S = np.repeat(lengths_D, counts_D)
        inner_S = tokens_S * (numbers_S + 1) // counts_S - tokens_S * numbers_S // counts_S
        return (inner_S + NUM_SPECIAL_TOKENS).astype(np.int32)


def longest_piece(packing: PackingConfig, objective: Objective) -> int:
    """Most tokens of a piece as `Pieces` counts them: a pair has a [SEP] more than a piece."""
    return packing.max_sequence_tokens - has_pairs(objective)


def sequence_lengths(pieces: Pieces, objective: Objective) -> NDArray[np.int32]:
    """Tokens of the sequence of each piece, as planned.

    Of pairs at most: a piece of a single word stays whole and so has no second [SEP], which is not
    known until its text is read.
    """
    if not has_pairs(objective):
        return pieces.lengths_S
    return pieces.lengths_S + (pieces.lengths_S >= SHORTEST_PAIR - 1).astype(np.int32)


def is_inner(starts: NDArray[np.integer]) -> NDArray[np.bool_]:
    """For each token of sequences laid end to end, whether it is of the text: no [CLS], no [SEP].

    Args:
        starts: Where each sequence starts, then the end of the last.
    """
    is_inner_T = np.ones(int(starts[-1]), np.bool_)
    is_inner_T[starts[:-1]] = is_inner_T[starts[1:] - 1] = False
    return is_inner_T
