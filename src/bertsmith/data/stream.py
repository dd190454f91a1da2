"""What pretraining sees at each step, as a pure function of the seed and the step.

Shape legend: S pieces (sequences), P packs, T packed tokens.
"""

import threading
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch, StepShare, pack
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.masking import (
    choose_positions,
    hide,
    mask_pack,
    masked_batch,
    ordinary_positions,
)
from bertsmith.data.packing import longest_first, plan_packs
from bertsmith.data.pieces import Corpus, Pieces
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _EpochPlan:
    """How the pieces are dealt in one epoch."""

    epoch: int
    piece_at_S: NDArray[np.int64]
    """The piece at each place, longest first."""

    packs_P: NDArray[np.int64]
    """The order of the packs."""


class PretrainStream:
    """Every piece of every document once an epoch, packed and masked anew each time.

    All packs of the corpus are planned together, by length (`plan_packs`), so every epoch has the
    same number of steps, and any step can be built without the ones before it. A pack holds
    its sequences longest first, and each pack is a likeness of the corpus. What an epoch
    draws is which sequences of a length meet, in what order the packs come, and what is hidden.

    Masks are keyed by seed, epoch and place in the epoch. Methods may be called from any thread.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        packing: PackingConfig,
        masking: MaskingConfig,
        tokens_per_step: int,
        seed: int,
    ) -> None:
        """Plan the packs; nothing is read but the lengths.

        Args:
            corpus: Documents to learn from.
            packing: Sizes of packs and sequences.
            masking: What to hide.
            tokens_per_step: Most tokens in a step: as many whole packs as that allows, at least 1.
            seed: Of order and masks, at least 0.

        Raises:
            UserError: The corpus has no tokens.
        """
        self._corpus, self._masking, self._seed = corpus, masking, seed
        self._pieces = Pieces(corpus, max_sequence_tokens=packing.max_sequence_tokens)
        if self._pieces.num_pieces == 0:
            raise UserError("the data to train on holds no tokens; prepare it from other text")
        self._shapes = plan_packs(self._pieces.lengths_S, capacity_tokens=packing.tokens_per_pack)
        self.num_tokens_per_epoch = int(self._pieces.lengths_S.sum(dtype=np.int64))
        """Tokens of an epoch, special tokens included."""
        self.packs_per_step = max(tokens_per_step // packing.tokens_per_pack, 1)
        """Packs in a step; the last step of an epoch may have fewer."""
        self.efficiency = self.num_tokens_per_epoch / (
            self._shapes.num_packs * packing.tokens_per_pack
        )
        """Real tokens over the packs' budget; the same in every epoch."""
        self._plans: list[_EpochPlan] = []
        self._plans_lock = threading.Lock()

    def steps_in_epoch(self, epoch: int) -> int:
        """Steps of an epoch, the same for all of them, at least 1."""
        assert epoch >= 0, epoch
        return -(-self._shapes.num_packs // self.packs_per_step)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch a global step falls in, and its number there; both from 0."""
        return divmod(step, self.steps_in_epoch(0))

    def step(self, step: int) -> list[MaskedBatch]:
        """The packs of a global step, counted from 0 over all epochs."""
        epoch, _ = self.epoch_of(step)
        return [
            mask_pack(
                replace(_pack_of(self._pieces, pieces_S), first_row=number << ROWS_OF_A_PACK_BITS),
                config=self._masking,
                vocab=self._corpus.vocab,
                rng=_rng(self._seed, epoch, pack, _Purpose.MASKS),
            )
            for number, (pack, pieces_S) in enumerate(self._packs_of(step))
        ]

    def share(self, step: int, *, rank: int, num_ranks: int) -> StepShare[MaskedBatch]:
        """A rank's packs of a step."""
        packs = self.step(step)
        numbers = range(rank, len(packs), num_ranks)
        mine = [packs[n] for n in numbers]
        if len(mine) < -(-len(packs) // num_ranks):
            vocab = self._corpus.vocab
            none = torch.zeros(0, dtype=torch.int64)
            inputs = pack([torch.tensor([vocab.cls_id, vocab.sep_id])])
            mine.append(MaskedBatch(inputs=inputs, positions_M=none, targets_M=none))
        return StepShare(packs=mine, numbers=numbers, num_packs=len(packs))

    def documents_of(self, step: int) -> list[list[int]]:
        """Which documents the sequences of each pack of a step are from, in the pack's order."""
        return [
            self._pieces.documents_of(pieces_S).tolist() for _, pieces_S in self._packs_of(step)
        ]

    def _packs_of(self, step: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Each pack's number in the epoch, and its pieces."""
        epoch, step_of_epoch = self.epoch_of(step)
        plan = self._plan_of(epoch)
        first = step_of_epoch * self.packs_per_step
        last = min(first + self.packs_per_step, self._shapes.num_packs)
        return [
            (pack, plan.piece_at_S[self._shapes.places_of(int(plan.packs_P[pack]))])
            for pack in range(first, last)
        ]

    def _plan_of(self, epoch: int) -> _EpochPlan:
        """The plan of an epoch; the last two stay, for a step made ahead over the border."""
        with self._plans_lock:
            for plan in self._plans:
                if plan.epoch == epoch:
                    return plan
            rng = _rng(self._seed, epoch, 0, _Purpose.ORDER)
            plan = _EpochPlan(
                epoch=epoch,
                piece_at_S=longest_first(self._pieces.lengths_S, rng),
                packs_P=rng.permutation(self._shapes.num_packs),
            )
            self._plans = [*self._plans[-1:], plan]
            return plan


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


def _rng(seed: int, first: int, second: int, purpose: _Purpose) -> np.random.Generator:
    """Random numbers of their own for every key."""
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((seed, first, second, int(purpose))))
    )
