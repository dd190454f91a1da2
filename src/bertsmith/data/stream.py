"""What pretraining sees at each step, as a pure function of the seed and the step.

Shape legend: B blocks of documents, S pieces (sequences), P packs, T packed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch, StepShare
from bertsmith.data.block_counts import COUNTS_FILE, BlockCount, count_blocks
from bertsmith.data.blocks import BLOCKS_ABREAST, BlockPlan, EpochLayout, cut_blocks, plan_block
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.masking import (
    choose_positions,
    hide,
    mask_pack,
    masked_batch,
    ordinary_positions,
)
from bertsmith.data.packing import longest_first, plan_packs
from bertsmith.data.pieces import Corpus, Pieces, SequenceVocab
from bertsmith.data.prefetch import prefetch
from bertsmith.errors import UserError

__all__ = ["PretrainStream", "prefetch", "valid_batches"]  # what a recipe needs

VALID_SEED = 20181011  # BERT's first day on arXiv; validation is the same whatever the run's seed

ROWS_OF_A_PACK_BITS = 32
"""Rows of dropout that each pack of a step has to itself, as a power of two."""


class _Purpose(IntEnum):
    """What random numbers are for: the last part of their key. Never renumber."""

    ORDER = 0
    MASKS = 1
    VALID_SAMPLE = 2
    VALID_MASKS = 3
    BLOCKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Deal:
    """How the pieces of a block are dealt in one epoch."""

    piece_at_S: NDArray[np.int64]
    """The piece at each place, longest first."""

    packs_P: NDArray[np.int64]
    """The order of the packs."""


class _Pack(NamedTuple):
    """What a pack is made of."""

    number_in_step: int
    number_in_epoch: int
    pieces: Pieces
    """Those of its block."""

    pieces_S: NDArray[np.int64]
    """Its own, longest first."""


class PretrainStream:
    """Every piece of every document once an epoch, packed and masked anew each time.

    The packs of a block of the corpus (`data.blocks`; a corpus of up to 2^27 tokens is one) are
    planned together, by length (`plan_packs`), and each pack is a likeness of the corpus. A pack
    holds its sequences longest first. What an epoch draws is the order of the blocks, which
    sequences of a length meet, in what order the packs of a block come, and what is hidden. Every
    epoch has the same number of steps, and any step, or any rank's share of it, is built from the
    few blocks that it lies in.

    Masks are keyed by seed, epoch and place in the epoch: a step's content knows nothing of ranks
    or threads. Methods may be called from any thread.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        packing: PackingConfig,
        masking: MaskingConfig,
        tokens_per_step: int,
        seed: int,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Count the packs; nothing is read but lengths, and those only if there is no note of it.

        Of several processes on the same folder one should do this before the others, which then
        find its note (`data.block_counts`).

        Args:
            corpus: Documents to learn from.
            packing: Sizes of packs and sequences.
            masking: What to hide.
            tokens_per_step: Most tokens in a step: as many whole packs as that allows, at least 1.
            seed: Of order and masks, at least 0.
            advance: Told the blocks counted and in all, where there are several and no note.

        Raises:
            UserError: The corpus has no tokens.
        """
        self._corpus, self._masking, self._seed, self._packing = corpus, masking, seed, packing
        self._blocks = cut_blocks(corpus)
        # Those abreast now, and those of the next group, which a step made ahead may reach.
        num_kept = 2 * min(self._blocks.num_blocks, BLOCKS_ABREAST)
        self._plan_of = lru_cache(maxsize=num_kept)(self._make_plan)
        self._deal_of = lru_cache(maxsize=num_kept)(self._make_deal)
        self._layout_of = lru_cache(maxsize=2)(self._make_layout)
        self._counts: list[BlockCount] | None = None
        if self._blocks.num_blocks > 1:
            self._counts = count_blocks(corpus, self._blocks, packing, advance=advance)
            self._num_packs_B = np.array([count.packs for count in self._counts], np.int64)
            num_tokens = sum(count.tokens for count in self._counts)
        else:
            only = self._plan_of(0)
            self._num_packs_B = np.array([only.shapes.num_packs], np.int64)
            num_tokens = int(only.pieces.lengths_S.sum(dtype=np.int64))
        self._num_packs = int(self._num_packs_B.sum())
        if self._num_packs == 0:
            raise UserError("the data to train on holds no tokens; prepare it from other text")
        self.num_tokens_per_epoch = num_tokens
        """Tokens of an epoch, special tokens included."""
        self.packs_per_step = max(tokens_per_step // packing.tokens_per_pack, 1)
        """Packs in a step; the last step of an epoch may have fewer."""
        self.efficiency = num_tokens / (self._num_packs * packing.tokens_per_pack)
        """Real tokens over the packs' budget; the same in every epoch."""

    def steps_in_epoch(self, epoch: int) -> int:
        """Steps of an epoch, the same for all of them, at least 1."""
        assert epoch >= 0, epoch
        return -(-self._num_packs // self.packs_per_step)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch a global step falls in, and its number there; both from 0."""
        return divmod(step, self.steps_in_epoch(0))

    def step(self, step: int) -> list[MaskedBatch]:
        """The packs of a global step, counted from 0 over all epochs."""
        return list(self.share(step, rank=0, num_ranks=1).packs)

    def share(self, step: int, *, rank: int, num_ranks: int) -> StepShare[MaskedBatch]:
        """One rank's part of a global step; no other pack is built.

        Args:
            step: Counted from 0 over all epochs.
            rank: From 0.
            num_ranks: Ranks that share the step, at least 1; may be more than it has packs.
        """
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        epoch, _ = self.epoch_of(step)
        mine = self._packs_of(step, rank=rank, num_ranks=num_ranks)
        packs = [
            mask_pack(
                replace(
                    _pack_of(pack.pieces, pack.pieces_S),
                    first_row=pack.number_in_step << ROWS_OF_A_PACK_BITS,
                ),
                config=self._masking,
                vocab=self._corpus.vocab,
                rng=_rng(self._seed, epoch, pack.number_in_epoch, _Purpose.MASKS),
            )
            for pack in mine
        ]
        num_packs = len(self._range_of(step))
        if len(packs) < -(-num_packs // num_ranks):
            packs.append(_filler(self._corpus.vocab, number=rank + len(packs) * num_ranks))
        return StepShare(
            packs=packs,
            numbers=[pack.number_in_step for pack in mine],
            num_packs=num_packs,
        )

    def documents_of(self, step: int) -> list[list[int]]:
        """Which documents the sequences of each pack of a step are from, in the pack's order."""
        return [
            pack.pieces.documents_of(pack.pieces_S).tolist()
            for pack in self._packs_of(step, rank=0, num_ranks=1)
        ]

    def some_lengths(self, *, at_most: int) -> NDArray[np.int32]:
        """Tokens of some sequences of the largest block, special ones included; at least one."""
        block = int(np.argmax(self._num_packs_B))
        lengths_S = Pieces(
            self._corpus,
            max_sequence_tokens=self._packing.max_sequence_tokens,
            runs=self._blocks.runs_of(block),
        ).lengths_S
        return lengths_S[:: -(-len(lengths_S) // at_most)]

    def _range_of(self, step: int) -> range:
        """The packs of a step by their numbers in the epoch."""
        _, step_of_epoch = self.epoch_of(step)
        first = step_of_epoch * self.packs_per_step
        return range(first, min(first + self.packs_per_step, self._num_packs))

    def _packs_of(self, step: int, *, rank: int, num_ranks: int) -> list[_Pack]:
        """The packs of a rank."""
        epoch, _ = self.epoch_of(step)
        layout, packs = self._layout_of(epoch), []
        for number, pack in list(enumerate(self._range_of(step)))[rank::num_ranks]:
            block, number_in_block = layout.find(pack)
            plan, deal = self._plan_of(block), self._deal_of(epoch, block)
            places_S = plan.shapes.places_of(int(deal.packs_P[number_in_block]))
            packs.append(_Pack(number, pack, plan.pieces, deal.piece_at_S[places_S]))
        return packs

    def _make_layout(self, epoch: int) -> EpochLayout:
        rng = _rng(self._seed, epoch, 0, _Purpose.BLOCKS)
        block_B = rng.permutation(self._blocks.num_blocks)
        return EpochLayout(block_B, self._num_packs_B[block_B])

    def _make_plan(self, block: int) -> BlockPlan:
        plan = plan_block(self._corpus, self._blocks, block, self._packing)
        if self._counts is not None and self._counts[block].packs != plan.shapes.num_packs:
            raise UserError(
                f"{self._corpus.folder}/{COUNTS_FILE}: block {block} has "
                f"{plan.shapes.num_packs:,} packs, not {self._counts[block].packs:,}; delete the "
                "file and start again"
            )
        return plan

    def _make_deal(self, epoch: int, block: int) -> _Deal:
        plan = self._plan_of(block)
        rng = _rng(self._seed, epoch, block, _Purpose.ORDER)
        return _Deal(
            piece_at_S=longest_first(plan.pieces.lengths_S, rng),
            packs_P=rng.permutation(plan.shapes.num_packs),
        )


def valid_batches(
    corpus: Corpus, *, packing: PackingConfig, masking: MaskingConfig, max_tokens: int
) -> list[MaskedBatch]:
    """The same hidden tokens at every validation of every run.

    Documents are drawn in an order that depends on nothing but how many there are, whole ones,
    until the next would pass `max_tokens` (at least one is taken). A piece's masks depend on
    its document alone, so they stay when `max_tokens` or the pack's size changes: the share is
    rounded up or down at random, right on average, instead of exact for each pack.

    Args:
        corpus: Held-out documents.
        packing: Sizes of packs and sequences.
        masking: What to hide.
        max_tokens: Most tokens in all, special tokens included.

    Raises:
        UserError: No token is hidden anywhere.
    """
    pieces = Pieces(corpus, max_sequence_tokens=packing.max_sequence_tokens)
    sample = np.sort(_valid_sample(corpus, pieces, max_tokens))
    lengths_S = pieces.lengths_S[sample]
    shapes = plan_packs(lengths_S, capacity_tokens=packing.tokens_per_pack)
    piece_at_S = sample[np.argsort(-lengths_S, kind="stable")]
    batches = [
        _mask_by_piece(corpus, pieces, piece_at_S[shapes.places_of(pack)], masking)
        for pack in range(shapes.num_packs)
    ]
    if not any(batch.num_targets for batch in batches):
        raise UserError(
            "the validation data holds too few words to hide any; prepare more held-out text"
        )
    return batches


def _valid_sample(corpus: Corpus, pieces: Pieces, max_tokens: int) -> NDArray[np.int64]:
    """The pieces of the documents to validate on."""
    order = _rng(VALID_SEED, 0, 0, _Purpose.VALID_SAMPLE).permutation(corpus.num_documents)
    firsts = np.zeros(pieces.num_pieces + 1, np.int64)
    np.cumsum(pieces.lengths_S, out=firsts[1:])
    chosen: list[int] = []
    num_tokens = 0
    for document in order.tolist():
        numbers = pieces.pieces_of(document)
        num_tokens += int(firsts[numbers.stop] - firsts[numbers.start])
        if chosen and num_tokens > max_tokens:
            break
        chosen.extend(numbers)
    return np.array(chosen, dtype=np.int64)


def _mask_by_piece(
    corpus: Corpus, pieces: Pieces, pieces_S: NDArray[np.int64], masking: MaskingConfig
) -> MaskedBatch:
    """A pack whose masks are keyed by the document and the piece's number in it."""
    vocab = corpus.vocab
    pack = _pack_of(pieces, pieces_S)
    ids_T = pack.input_ids_T.numpy()
    hidden_T = np.empty_like(ids_T)
    positions: list[NDArray[np.int64]] = []
    starts = pack.starts_N1.tolist()
    documents = pieces.documents_of(pieces_S).tolist()
    for piece, document, start, stop in zip(
        pieces_S.tolist(), documents, starts[:-1], starts[1:], strict=True
    ):
        number = piece - pieces.pieces_of(document).start
        rng = _rng(VALID_SEED, document, number, _Purpose.VALID_MASKS)
        sequence = ids_T[start:stop]
        ordinary = ordinary_positions(sequence, vocab)
        num_hidden = int(masking.share * len(ordinary) + rng.random())
        chosen = choose_positions(ordinary, num_hidden, rng)
        hidden_T[start:stop] = hide(sequence, chosen, config=masking, vocab=vocab, rng=rng)
        positions.append(chosen + start)
    return masked_batch(pack, hidden_T, np.concatenate(positions))


def _pack_of(pieces: Pieces, pieces_S: NDArray[np.int64]) -> PackedBatch:
    """A pack of the pieces, in the order given."""
    ids_T, starts = pieces.lay(pieces_S)
    lengths = np.diff(starts)
    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        position_ids_T=torch.from_numpy(np.arange(len(ids_T)) - np.repeat(starts[:-1], lengths)),
        segment_ids_T=torch.zeros(len(ids_T), dtype=torch.int64),
        starts_N1=torch.from_numpy(starts.astype(np.int32)),
        longest=int(lengths.max()),
    )


def _filler(vocab: SequenceVocab, *, number: int) -> MaskedBatch:
    """A pack of no text, for a rank that has one pack less than others: nothing to predict."""
    inputs = PackedBatch(
        input_ids_T=torch.tensor([vocab.cls_id, vocab.sep_id]),
        position_ids_T=torch.arange(2),
        segment_ids_T=torch.zeros(2, dtype=torch.int64),
        starts_N1=torch.tensor([0, 2], dtype=torch.int32),
        longest=2,
        first_row=number << ROWS_OF_A_PACK_BITS,
    )
    none_M = torch.zeros(0, dtype=torch.int64)
    return MaskedBatch(inputs=inputs, positions_M=none_M, targets_M=none_M)


def _rng(seed: int, first: int, second: int, purpose: _Purpose) -> np.random.Generator:
    """Random numbers of their own for every key."""
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((seed, first, second, int(purpose))))
    )
