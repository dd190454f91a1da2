"""What pretraining sees at each step, as a pure function of the seed and the step.

Shape legend: B blocks of documents, S pieces (sequences), P packs, T packed tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch, PairTargets, StepShare
from bertsmith.data.block_counts import COUNTS_FILE, BlockCount, count_blocks
from bertsmith.data.blocks import BLOCKS_ABREAST, BlockPlan, EpochLayout, cut_blocks, plan_block
from bertsmith.data.config import MaskingConfig, Objective, PackingConfig, has_pairs
from bertsmith.data.masking import Masker, PieceText, mask_pack
from bertsmith.data.packing import longest_first
from bertsmith.data.pairs import NO_PIECE, PairMaker, match_pieces
from bertsmith.data.pieces import (
    Corpus,
    Pieces,
    SequenceVocab,
    is_inner,
    longest_piece,
    sequence_lengths,
)
from bertsmith.data.prefetch import prefetch
from bertsmith.errors import UserError

__all__ = ["PretrainStream", "prefetch"]  # what a recipe needs

ROWS_OF_A_PACK_BITS = 32
"""Rows of dropout that each pack of a step has to itself, as a power of two."""


class _Purpose(IntEnum):
    """What random numbers are for: the last part of their key. Never renumber."""

    ORDER = 0
    MASKS = 1
    BLOCKS = 4  # 2 and 3 are those of `held_out`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Deal:
    """How the pieces of a block are dealt in one epoch."""

    piece_at_S: NDArray[np.int64]
    """The piece at each place, longest first."""

    matched_S: NDArray[np.int64] | None
    """Of each place, the piece that the piece there is matched with, or `NO_PIECE`; None if pieces
    are not matched."""

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

    matched_S: NDArray[np.int64]
    """What each of them is matched with."""

    def laid(self, pieces_S: NDArray[np.int64]) -> PackedBatch:
        """Some pieces of the block, with the pack's place in the step."""
        first_row = self.number_in_step << ROWS_OF_A_PACK_BITS
        return replace(self.pieces.pack(pieces_S), first_row=first_row)


class PretrainStream:
    """Every piece of every document once an epoch, packed and masked anew each time.

    The packs of a block of the corpus (`data.blocks`; a corpus of up to 2^27 tokens is one) are
    planned together, by length (`plan_packs`), and each pack is a likeness of the corpus. A pack
    holds its sequences longest first. What an epoch draws is the order of the blocks, which
    sequences of a length meet, in what order the packs of a block come, and what is hidden. Every
    epoch has the same number of steps, and any step, or any rank's share of it, is built from the
    few blocks that it lies in.

    With an objective of pairs each piece is cut in two segments (`data.pairs`), and tokens keep the
    masks that they have in their piece, wherever they are put.

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
        objective: Objective = "mlm",
        type_counts_V: NDArray[np.int64] | None = None,
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
            objective: What is asked besides hidden tokens.
            type_counts_V: How often each id occurs in the corpus; needed for a rare boost.
            advance: Told the blocks counted and in all, where there are several and no note.

        Raises:
            UserError: The corpus has no tokens, or too few documents for the objective.
        """
        self._corpus, self._masking, self._seed, self._packing = corpus, masking, seed, packing
        self.objective = objective
        self._pairs: PairMaker | None = None
        if has_pairs(objective):
            self._pairs = PairMaker(objective=objective, seed=seed)
        if (masking.unit != "token" or self._pairs is not None) and corpus.num_documents:
            corpus.word_starts(0)  # or says now that there are none
        self._masker = Masker(
            masking,
            corpus.vocab,
            seed=seed,
            type_counts_V=type_counts_V,
        )
        self._blocks = cut_blocks(corpus)
        if objective == "mlm+nsp" and 0 < corpus.num_documents < 2 * self._blocks.num_blocks:
            raise UserError(
                f"--objective {objective}: wrong next segments come from other documents, and the "
                f"training text has too few (documents: {corpus.num_documents}, blocks: "
                f"{self._blocks.num_blocks}); prepare it in more, shorter ones, or give "
                "--objective mlm+sop"
            )
        # Those abreast now, and those of the next group, which a step made ahead may reach.
        num_kept = 2 * min(self._blocks.num_blocks, BLOCKS_ABREAST)
        self._plan_of = lru_cache(maxsize=num_kept)(self._make_plan)
        self._deal_of = lru_cache(maxsize=num_kept)(self._make_deal)
        self._layout_of = lru_cache(maxsize=2)(self._make_layout)
        self._counts: list[BlockCount] | None = None
        if self._blocks.num_blocks > 1:
            self._counts = count_blocks(
                corpus, self._blocks, packing, objective=objective, advance=advance
            )
            self._num_packs_B = np.array([count.packs for count in self._counts], np.int64)
            num_tokens = sum(count.tokens for count in self._counts)
        else:
            only = self._plan_of(0)
            self._num_packs_B = np.array([only.shapes.num_packs], np.int64)
            num_tokens = int(only.lengths_S.sum(dtype=np.int64))
        self._num_packs = int(self._num_packs_B.sum())
        if self._num_packs == 0:
            raise UserError("the data to train on holds no tokens; prepare it from other text")
        self.num_tokens_per_epoch = num_tokens
        """Tokens of an epoch, special tokens included; of pairs, one more for each piece of a
        single word than there are."""
        self.packs_per_epoch = self._num_packs
        """Packs of an epoch, the same in every one."""
        self.packs_per_step = max(tokens_per_step // packing.tokens_per_pack, 1)
        """Packs in a step; the last step of an epoch may have fewer."""
        self.efficiency = num_tokens / (self._num_packs * packing.tokens_per_pack)
        """Real tokens over the packs' budget; the same in every epoch."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; of a corpus of several blocks, at most."""
        if self._blocks.num_blocks > 1:
            return self._packing.max_sequence_tokens
        return int(self._plan_of(0).lengths_S.max())

    @property
    def fullest(self) -> int:
        """Tokens of the fullest pack, at most."""
        return min(self._packing.tokens_per_pack, self.num_tokens_per_epoch)

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
        packs = [self._masked(pack, epoch) for pack in mine]
        num_packs = len(self._range_of(step))
        if len(packs) < -(-num_packs // num_ranks):
            filler = _filler(self._corpus.vocab, number=rank + len(packs) * num_ranks)
            packs.append(filler if self._pairs is None else replace(filler, pairs=_no_pairs()))
        return StepShare(
            packs=packs,
            numbers=[pack.number_in_step for pack in mine],
            num_packs=num_packs,
        )

    def _masked(self, pack: _Pack, epoch: int) -> MaskedBatch:
        try:
            return self._single(pack, epoch) if self._pairs is None else self._paired(pack, epoch)
        except UserError:
            raise
        except Exception as error:
            documents = sorted(set(pack.pieces.documents_of(pack.pieces_S).tolist()))
            error.add_note(f"while reading documents {documents} of {self._corpus.folder}")
            raise

    def _single(self, pack: _Pack, epoch: int) -> MaskedBatch:
        """A sequence for each piece."""
        batch = pack.laid(pack.pieces_S)
        if self._masking.is_classic:
            return self._classic(batch, pack, epoch)
        return self._masker.mask(
            batch, self._text_of(pack.pieces, pack.pieces_S, batch), epoch=epoch
        )

    def _paired(self, pack: _Pack, epoch: int) -> MaskedBatch:
        """A pair of segments for each piece; masks are those of whole pieces."""
        assert self._pairs is not None
        layout = self._pairs.lay(pack.pieces, pack.pieces_S, pack.matched_S, epoch=epoch)
        sources = pack.laid(layout.sources_Q)
        if self._masking.is_classic:
            masked = self._classic(layout.packed(sources), pack, epoch)
            return replace(masked, pairs=layout.targets())
        text = self._text_of(pack.pieces, layout.sources_Q, sources)
        return layout.arranged(self._masker.mask(sources, text, epoch=epoch))

    def _classic(self, batch: PackedBatch, pack: _Pack, epoch: int) -> MaskedBatch:
        return mask_pack(
            batch,
            config=self._masking,
            vocab=self._corpus.vocab,
            rng=_rng(self._seed, epoch, pack.number_in_epoch, _Purpose.MASKS),
            share=float(self._masking.share_in(epoch)),
        )

    def predicted(self, document: int, *, epoch: int) -> NDArray[np.bool_]:
        """Which tokens of a document an epoch predicts; no pack is built.

        Not for classic masking (`MaskingConfig.is_classic`), where packs draw, not documents: see
        `origins_of`.

        Args:
            document: Its number in the corpus.
            epoch: From 0.

        Returns:
            One for each token of the document, its special tokens left out.
        """
        assert not self._masking.is_classic
        pieces = self._cut([range(document, document + 1)])
        return self.predicted_of(pieces, np.arange(pieces.num_pieces), epoch=epoch)

    def predicted_of(
        self, pieces: Pieces, pieces_S: NDArray[np.int64], *, epoch: int
    ) -> NDArray[np.bool_]:
        """Which tokens of some pieces an epoch predicts, special tokens left out, end to end.

        For classic masking: what it would be if pieces drew for themselves, as they do not.

        Args:
            pieces: Of the stream's corpus, cut as the stream does.
            pieces_S: Some of them.
            epoch: From 0.
        """
        if len(pieces_S) == 0:
            return np.zeros(0, np.bool_)
        text = self._text_of(pieces, pieces_S, pieces.pack(pieces_S))
        predicted_T = self._masker.predicted(text, epoch=epoch)
        return predicted_T[is_inner(text.starts_N1)]

    def _text_of(
        self, pieces: Pieces, pieces_S: NDArray[np.int64], batch: PackedBatch
    ) -> PieceText:
        return PieceText(
            ids_T=batch.input_ids_T.numpy(),
            starts_N1=batch.starts_N1.numpy().astype(np.int64),
            word_starts_T=(
                None if self._masking.unit == "token" else pieces.lay_word_starts(pieces_S)
            ),
            documents_N=pieces.documents_of(pieces_S),
            numbers_N=pieces.numbers_of(pieces_S),
        )

    def origins_of(self, step: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each pack of a step: each sequence's document, and its first token's number there.

        A token at place k of a sequence that starts with [CLS] is its document's token
        first + k - 1.
        """
        return [
            (pack.pieces.documents_of(pack.pieces_S), pack.pieces.first_tokens_of(pack.pieces_S))
            for pack in self._packs_of(step, rank=0, num_ranks=1)
        ]

    def documents_of(self, step: int) -> list[list[int]]:
        """Which documents the sequences of each pack of a step are from, in the pack's order.

        Of pairs, all documents that a pack has text of, ascending.
        """
        epoch, _ = self.epoch_of(step)
        found = []
        for pack in self._packs_of(step, rank=0, num_ranks=1):
            pieces_S = pack.pieces_S
            if self._pairs is not None:
                layout = self._pairs.lay(pack.pieces, pieces_S, pack.matched_S, epoch=epoch)
                pieces_S = layout.sources_Q
            found.append(pack.pieces.documents_of(pieces_S).tolist())
        return found

    def some_lengths(self, *, at_most: int) -> NDArray[np.int32]:
        """Tokens of some sequences of the largest block, special ones included; at least one."""
        block = int(np.argmax(self._num_packs_B))
        lengths_S = sequence_lengths(self._cut(self._blocks.runs_of(block)), self.objective)
        return lengths_S[:: -(-len(lengths_S) // at_most)]

    def _cut(self, runs: Sequence[range]) -> Pieces:
        longest = longest_piece(self._packing, self.objective)
        return Pieces(self._corpus, max_sequence_tokens=longest, runs=runs)

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
            pieces_S = deal.piece_at_S[places_S]
            matched_S = (
                np.full(len(pieces_S), NO_PIECE)
                if deal.matched_S is None
                else deal.matched_S[places_S]
            )
            packs.append(_Pack(number, pack, plan.pieces, pieces_S, matched_S))
        return packs

    def _make_layout(self, epoch: int) -> EpochLayout:
        rng = _rng(self._seed, epoch, 0, _Purpose.BLOCKS)
        block_B = rng.permutation(self._blocks.num_blocks)
        return EpochLayout(block_B, self._num_packs_B[block_B])

    def _make_plan(self, block: int) -> BlockPlan:
        plan = plan_block(self._corpus, self._blocks, block, self._packing, self.objective)
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
        piece_at_S = longest_first(plan.lengths_S, rng)
        packs_P = rng.permutation(plan.shapes.num_packs)
        matched_S = None
        if self.objective == "mlm+nsp":
            matched_S = match_pieces(piece_at_S, plan.pieces.documents_of(piece_at_S), rng)
        return _Deal(piece_at_S=piece_at_S, matched_S=matched_S, packs_P=packs_P)


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


def _no_pairs() -> PairTargets:
    none_P = torch.zeros(0, dtype=torch.int64)
    return PairTargets(sequences_P=none_P, labels_P=none_P)


def _rng(seed: int, first: int, second: int, purpose: _Purpose) -> np.random.Generator:
    """Random numbers of their own for every key."""
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((seed, first, second, int(purpose))))
    )
