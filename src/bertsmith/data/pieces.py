"""Documents cut to fit: which part of which document a piece is.

Shape legend: D documents, D1 = D + 1; S pieces; T tokens of a sequence.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    def lengths_D(self) -> NDArray[np.int64]:
        """Tokens of each document, special ones not counted."""

    @property
    def vocab(self) -> SequenceVocab:
        """The vocabulary of the ids."""

    def document(self, index: int, /) -> NDArray[np.integer]:
        """Ids of one document, without special tokens."""


class Pieces:
    """The documents of a corpus, long ones cut into pieces.

    A document too long for one sequence is cut into the fewest pieces that fit, as equal as can
    be. Filling each piece to the brim would leave a rest of any size, down to a word with no
    context to be predicted from; equal pieces are never under half the maximum, and cost less
    attention. An empty document gives no piece.
    """

    def __init__(self, corpus: Corpus, *, max_sequence_tokens: int) -> None:
        self._corpus = corpus
        self._room = max_sequence_tokens - NUM_SPECIAL_TOKENS
        lengths_D = np.asarray(corpus.lengths_D, dtype=np.int64)
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
        """The document each piece is from."""
        return np.searchsorted(self._firsts_D1, pieces_S, side="right") - 1

    def pieces_of(self, document: int) -> range:
        """The pieces of a document."""
        return range(int(self._firsts_D1[document]), int(self._firsts_D1[document + 1]))

    def lay(self, pieces_S: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences of the pieces end to end, [CLS] ... [SEP] each.

        Returns:
            Their ids, and where each starts followed by the end of the last.
        """
        corpus, vocab = self._corpus, self._corpus.vocab
        starts = np.zeros(len(pieces_S) + 1, np.int64)
        np.cumsum(self.lengths_S[pieces_S], out=starts[1:])
        ids_T = np.empty(int(starts[-1]), np.int64)
        ids_T[starts[:-1]] = vocab.cls_id
        ids_T[starts[1:] - 1] = vocab.sep_id
        documents_S = self.documents_of(pieces_S)
        rest_S = pieces_S - self._firsts_D1[documents_S]
        counts_S = self._firsts_D1[documents_S + 1] - self._firsts_D1[documents_S]
        for document, start, stop, number, count in zip(
            documents_S.tolist(),
            (starts[:-1] + 1).tolist(),
            (starts[1:] - 1).tolist(),
            rest_S.tolist(),
            counts_S.tolist(),
            strict=True,
        ):
            ids = corpus.document(document)
            if count > 1:
                ids = ids[len(ids) * number // count : len(ids) * (number + 1) // count]
            ids_T[start:stop] = ids
        return ids_T, starts

    def _all_lengths(
        self, lengths_D: NDArray[np.int64], counts_D: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Piece j of k holds tokens L*j//k to L*(j+1)//k of its document of L."""
        counts_S = np.repeat(counts_D, counts_D)
        numbers_S = np.arange(len(counts_S)) - np.repeat(self._firsts_D1[:-1], counts_D)
        tokens_S = np.repeat(lengths_D, counts_D)
        inner_S = tokens_S * (numbers_S + 1) // counts_S - tokens_S * numbers_S // counts_S
        return (inner_S + NUM_SPECIAL_TOKENS).astype(np.int32)
