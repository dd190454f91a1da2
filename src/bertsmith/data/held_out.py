"""Held-out text with hidden tokens that are the same at every validation of every run.

Shape legend: D documents, S pieces (sequences), T packed tokens, M masked positions.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch
from bertsmith.data.config import MaskingConfig, Objective, PackingConfig
from bertsmith.data.masking import choose_positions, hide, masked_batch, ordinary_positions
from bertsmith.data.packing import plan_packs
from bertsmith.data.pairs import PairMaker, match_pieces
from bertsmith.data.pieces import Corpus, Pieces, longest_piece, sequence_lengths
from bertsmith.errors import UserError

VALID_SEED = 20181011  # BERT's first day on arXiv; validation is the same whatever the run's seed

VALID_MASKING = MaskingConfig(share=0.15, hide_share=0.8, noise_share=0.1)
"""BERT's own, whatever a run trains with: losses of runs that train with other masks compare."""

_SAMPLE, _MASKS, _MATCHES = 2, 3, 5
"""What random numbers are for: the last part of their key. Never renumber."""


def valid_batches(corpus: Corpus, *, packing: PackingConfig, max_tokens: int) -> list[MaskedBatch]:
    """The same hidden tokens at every validation of every run on this text.

    Documents are drawn in an order that depends on nothing but how many there are, whole ones,
    until the next would pass `max_tokens` (at least one is taken). What is hidden depends on a
    document alone: not on how the run masks, nor on how it cuts and packs. So the share is rounded
    up or down at random for each document, right on average.

    Args:
        corpus: Held-out documents.
        packing: Sizes of packs and sequences.
        max_tokens: Most tokens in all, special ones not counted.

    Raises:
        UserError: No token is hidden anywhere.
    """
    pieces = Pieces(corpus, max_sequence_tokens=packing.max_sequence_tokens)
    sample = np.sort(_valid_sample(corpus, pieces, max_tokens))
    lengths_S = pieces.lengths_S[sample]
    shapes = plan_packs(lengths_S, capacity_tokens=packing.tokens_per_pack)
    piece_at_S = sample[np.argsort(-lengths_S, kind="stable")]
    masked_document = _masked_documents(corpus)
    batches = [
        _masked_pieces(pieces, piece_at_S[shapes.places_of(pack)], masked_document)
        for pack in range(shapes.num_packs)
    ]
    if not any(batch.num_targets for batch in batches):
        raise UserError(
            "the validation data holds too few words to hide any; prepare more held-out text"
        )
    return batches


def valid_pairs(
    corpus: Corpus, *, packing: PackingConfig, max_tokens: int, objective: Objective
) -> list[MaskedBatch]:
    """The same pairs at every validation of every run on this text, with some tokens hidden.

    Of the documents that `valid_batches` takes, hidden alike. That scores hidden tokens in whole
    pieces, whatever a run trains with, so that its losses compare; these packs are for the pairs
    alone.

    Args:
        corpus: Held-out documents.
        packing: Sizes of packs and sequences.
        max_tokens: As for `valid_batches`.
        objective: Which pairs.

    Returns:
        Packs with pairs to judge; none if the documents are too few or too short for any.

    Raises:
        UserError: The beginnings of words were never noted.
    """
    pieces = Pieces(corpus, max_sequence_tokens=longest_piece(packing, objective))
    sample = np.sort(_valid_sample(corpus, pieces, max_tokens))
    lengths_S = sequence_lengths(pieces, objective)[sample]
    shapes = plan_packs(lengths_S, capacity_tokens=packing.tokens_per_pack)
    piece_at_S = sample[np.argsort(-lengths_S, kind="stable")]
    matched_S = match_pieces(piece_at_S, pieces.documents_of(piece_at_S), _rng(0, _MATCHES))
    maker = PairMaker(objective=objective, seed=VALID_SEED)
    masked_document = _masked_documents(corpus)
    batches = []
    for pack in range(shapes.num_packs):
        places_S = shapes.places_of(pack)
        layout = maker.lay(pieces, piece_at_S[places_S], matched_S[places_S], epoch=0)
        sources = _masked_pieces(pieces, layout.sources_Q, masked_document)
        batches.append(layout.arranged(sources))
    return [batch for batch in batches if batch.pairs and len(batch.pairs.labels_P)]


_MaskedDocument = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""A document's ids with some hidden, and which."""


def _masked_documents(corpus: Corpus) -> Callable[[int], _MaskedDocument]:
    return lru_cache(maxsize=256)(lambda number: _masked_document(corpus, number))


def _masked_pieces(
    pieces: Pieces,
    pieces_S: NDArray[np.int64],
    masked_document: Callable[[int], _MaskedDocument],
) -> MaskedBatch:
    """The pack of some pieces, hidden as their documents are."""
    packed = pieces.pack(pieces_S)
    hidden_T = packed.input_ids_T.numpy().copy()
    is_chosen_T = np.zeros(len(hidden_T), np.bool_)
    for document, offset, start, stop in zip(
        pieces.documents_of(pieces_S).tolist(),
        pieces.first_tokens_of(pieces_S).tolist(),
        (packed.starts_N1[:-1] + 1).tolist(),
        (packed.starts_N1[1:] - 1).tolist(),
        strict=True,
    ):
        hidden, is_chosen = masked_document(document)
        mine = slice(offset, offset + stop - start)
        hidden_T[start:stop], is_chosen_T[start:stop] = hidden[mine], is_chosen[mine]
    return masked_batch(packed, hidden_T, np.flatnonzero(is_chosen_T))


def _valid_sample(corpus: Corpus, pieces: Pieces, max_tokens: int) -> NDArray[np.int64]:
    """The pieces of the documents to validate on."""
    order = _rng(0, _SAMPLE).permutation(corpus.num_documents)
    num_tokens_D = np.cumsum(corpus.lengths(0, corpus.num_documents)[order], dtype=np.int64)
    num_documents = max(int(np.searchsorted(num_tokens_D, max_tokens, side="right")), 1)
    chosen = [piece for d in order[:num_documents].tolist() for piece in pieces.pieces_of(d)]
    return np.array(chosen, dtype=np.int64)


def _masked_document(corpus: Corpus, number: int) -> _MaskedDocument:
    rng = _rng(number, _MASKS)
    ids_T = corpus.document(number).astype(np.int64)
    ordinary = ordinary_positions(ids_T, corpus.vocab)
    num_hidden = int(VALID_MASKING.share * len(ordinary) + rng.random())
    chosen = choose_positions(ordinary, num_hidden, rng)
    is_chosen_T = np.zeros(len(ids_T), np.bool_)
    is_chosen_T[chosen] = True
    return hide(ids_T, chosen, config=VALID_MASKING, vocab=corpus.vocab, rng=rng), is_chosen_T


def _rng(document: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((VALID_SEED, document, 0, purpose)))
    )
