"""The values that travel from the data to the model: packed tokens, and what is asked of them.

Packed is the only form inside: sequences lie end to end on one token axis, and ``starts_N1``
says where each begins. Padding exists at the edges alone (`to_padded`, `from_padded`).

Shape legend (used by the whole package): T packed tokens, N sequences, N1 = N + 1, M masked
positions, P pairs, C classes, D width, H heads, K head width, F inner width, V vocabulary; B
sequences and S slots only in padded code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences end to end, each with its own special tokens, positions and attention."""

    input_ids_T: Tensor
    """Token ids, int64."""

    position_ids_T: Tensor
    """Position of each token in its own sequence, from 0, int64."""

    segment_ids_T: Tensor
    """BERT's token types: 0 for the first text, 1 for the second of a pair, int64."""

    starts_N1: Tensor
    """Where each sequence starts, then T: strictly increasing, int32."""

    longest: int
    """Tokens in the longest sequence."""

    first_row: int = 0
    """Number of the first token among all of its training step, by which dropout goes; rows of one
    step never overlap. Cutting a step into other packs then changes no dropout."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, special ones counted; there are no others."""
        return len(self.input_ids_T)

    @property
    def num_sequences(self) -> int:
        """Sequences in the pack."""
        return len(self.starts_N1) - 1

    def to(self, device: torch.device) -> Self:
        """The same pack on another device."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device, non_blocking=True),
            position_ids_T=self.position_ids_T.to(device, non_blocking=True),
            segment_ids_T=self.segment_ids_T.to(device, non_blocking=True),
            starts_N1=self.starts_N1.to(device, non_blocking=True),
        )

    def part(self, first: int, end: int) -> Self:
        """Sequences `first` to `end - 1`, with the dropout they have in the whole pack."""
        starts_N1 = self.starts_N1[first : end + 1]
        begin, stop = int(starts_N1[0]), int(starts_N1[-1])
        return replace(
            self,
            input_ids_T=self.input_ids_T[begin:stop],
            position_ids_T=self.position_ids_T[begin:stop],
            segment_ids_T=self.segment_ids_T[begin:stop],
            starts_N1=starts_N1 - begin,
            longest=int(starts_N1.diff().max()),
            first_row=self.first_row + begin,
        )

    def cuts(self, max_tokens: int) -> list[tuple[int, int]]:
        """Ranges of sequences of at most so many tokens each, in order, as few as need be.

        A sequence that is longer than that is a range of its own.
        """
        starts: list[int] = self.starts_N1.tolist()
        found, first = [], 0
        for end in range(1, len(starts)):
            is_last = end == len(starts) - 1
            if is_last or starts[end + 1] - starts[first] > max_tokens:
                found.append((first, end))
                first = end
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTargets:
    """Which sequences of a pack are two segments that a head has to judge, and the truth."""

    sequences_P: Tensor
    """Their numbers in the pack, ascending, int64."""

    labels_P: Tensor
    """0: the second segment follows the first in the text. 1: it does not. int64."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(
            self,
            sequences_P=self.sequences_P.to(device, non_blocking=True),
            labels_P=self.labels_P.to(device, non_blocking=True),
        )

    def part(self, first: int, end: int) -> Self:
        """Those among sequences `first` to `end - 1`, whose numbers then begin at 0."""
        bounds = self.sequences_P.new_tensor([first, end])
        low, high = torch.searchsorted(self.sequences_P, bounds).tolist()
        return replace(
            self,
            sequences_P=self.sequences_P[low:high] - first,
            labels_P=self.labels_P[low:high],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedBatch:
    """A pack, and what is to be said at some of its tokens: which one is hidden there, or a tag."""

    inputs: PackedBatch

    positions_M: Tensor
    """Where to predict, ascending, int64. Sparse: no grid of -100."""

    targets_M: Tensor
    """The token ids that stood there, or the ids of tags, int64."""

    pairs: PairTargets | None = None
    """What is asked of whole sequences; None where nothing ever is."""

    weights_M: Tensor | None = None
    """Weight of each term of the loss, float64; None: 1 each. Stays on the CPU, as of
    `LabelledBatch`."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return self.inputs.num_tokens

    @property
    def num_targets(self) -> int:
        """Places to predict at."""
        return len(self.targets_M)

    @property
    def target_counts(self) -> tuple[float, ...]:
        """Of each sum of the loss: tokens to predict or their weights, then pairs if there are."""
        weights_M = self.weights_M
        tokens = float(len(self.targets_M) if weights_M is None else weights_M.sum())
        return (tokens,) if self.pairs is None else (tokens, float(len(self.pairs.labels_P)))

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            positions_M=self.positions_M.to(device, non_blocking=True),
            targets_M=self.targets_M.to(device, non_blocking=True),
            pairs=None if self.pairs is None else self.pairs.to(device),
        )

    def cut(self, max_tokens: int) -> list[Self]:
        """The same in parts of at most so many tokens, whole sequences each."""
        if self.num_tokens <= max_tokens:
            return [self]
        parts = []
        for first, end in self.inputs.cuts(max_tokens):
            bounds = self.inputs.starts_N1[[first, end]].to(torch.int64)
            low, high = torch.searchsorted(self.positions_M, bounds).tolist()
            parts.append(
                replace(
                    self,
                    inputs=self.inputs.part(first, end),
                    positions_M=self.positions_M[low:high] - bounds[0],
                    targets_M=self.targets_M[low:high],
                    pairs=None if self.pairs is None else self.pairs.part(first, end),
                    weights_M=None if self.weights_M is None else self.weights_M[low:high],
                )
            )
        return parts

    def filler(self) -> Self:
        """Its first sequence, with nothing to predict."""
        return replace(
            self,
            inputs=self.inputs.part(0, 1),
            positions_M=self.positions_M[:0],
            targets_M=self.targets_M[:0],
            pairs=None if self.pairs is None else self.pairs.part(0, 0),
            weights_M=None if self.weights_M is None else self.weights_M[:0],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledBatch:
    """A pack whose sequences each have a target."""

    inputs: PackedBatch

    labels_N: Tensor
    """What each sequence is to be told, in the order of the pack's sequences: a class id (int64), a
    score (fp32), or with a second axis of C a 0 or 1 a label (fp32). The model's objective reads
    it."""

    rows_N: Tensor
    """Which row of the table each sequence came from, int64: predictions go back by it. A filler,
    whose sequence is computed and not counted, has none."""

    weights_N: Tensor | None = None
    """Weight of each term of the loss, float64, shaped like `labels_N`; None: 1 each. Stays on the
    CPU: only what a step's loss is divided by follows from it."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return self.inputs.num_tokens

    @property
    def num_targets(self) -> int:
        """Sequences that are learned from."""
        return len(self.rows_N)

    @property
    def target_counts(self) -> tuple[float, ...]:
        """Of the one sum of the loss: its terms (each of several labels is one), or weights."""
        if self.weights_N is None:
            return (float(self.labels_N[: self.num_targets].numel()),)
        return (float(self.weights_N[: self.num_targets].sum()),)

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels_N=self.labels_N.to(device, non_blocking=True),
            rows_N=self.rows_N.to(device, non_blocking=True),
        )

    def cut(self, max_tokens: int) -> list[Self]:
        """The same in parts of at most so many tokens, whole sequences each."""
        if self.num_tokens <= max_tokens:
            return [self]
        return [
            replace(
                self,
                inputs=self.inputs.part(first, end),
                labels_N=self.labels_N[first:end],
                rows_N=self.rows_N[first:end],  # a filler has none
                weights_N=None if self.weights_N is None else self.weights_N[first:end],
            )
            for first, end in self.inputs.cuts(max_tokens)
        ]

    def filler(self) -> Self:
        """Its first sequence, computed and not counted."""
        return replace(
            self,
            inputs=self.inputs.part(0, 1),
            labels_N=self.labels_N[:1],
            rows_N=self.rows_N[:0],
            weights_N=None if self.weights_N is None else self.weights_N[:1],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceBatch(LabelledBatch):
    """A pack of texts to embed, whose loss is one of all texts of a step.

    `labels_N` are their places in the step, int64, as `model.pair_objectives` orders them.
    """

    step_targets_S2: Tensor
    """Of all texts of the step: a number, the same for equal texts, and the score, float64."""

    gradients_ND: Tensor | None = None
    """Gradient of the step's summed loss with respect to each text's embedding, fp32, a filler's
    left out; None until a first pass has seen the whole step."""

    losses_N: Tensor | None = None
    """What each text adds to that sum, fp32."""

    def to(self, device: torch.device) -> Self:
        """The same batch on another device; the step's targets stay."""
        moved = LabelledBatch.to(self, device)
        if self.gradients_ND is None or self.losses_N is None:
            return moved
        return replace(
            moved,
            gradients_ND=self.gradients_ND.to(device, non_blocking=True),
            losses_N=self.losses_N.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare(Generic[BatchT]):
    """One rank's part of a training step: packs rank, rank + ranks, rank + 2 ranks, ... of it."""

    packs: Sequence[BatchT]
    """As many on every rank: who has one pack less ends with a filler, which has no targets."""

    numbers: Sequence[int]
    """Each real pack's number in the step."""

    num_packs: int
    """Packs of the whole step, on all ranks."""

    @classmethod
    def of_all(cls, packs: Sequence[BatchT]) -> Self:
        """The step of a run with one rank."""
        return cls(packs=packs, numbers=range(len(packs)), num_packs=len(packs))


class LossSum(NamedTuple):
    """A loss on its way to being divided: once, after the sum over micro-batches and ranks.

    A tuple, because that is what DataParallel, DDP and FSDP look for tensors in.
    """

    nats: Tensor
    """Sum of the loss over the targets, fp32, a scalar with a gradient. Of a loss of several means,
    a vector of the sums, in the order of the batch's `target_counts`."""

    num_targets: int
    """How many targets it is of, or the first of its sums is. What a step divides by is its packs'
    `target_counts`, which differ where a target has several terms or terms have weights, and are
    known before any pass."""


def pack(sequences: Sequence[Tensor], *, segments: Sequence[Tensor] | None = None) -> PackedBatch:
    """Lay sequences end to end, in the order given.

    Args:
        sequences: Token ids of each sequence, special tokens included, none empty.
        segments: Token types of each sequence; None means 0 throughout.
    """
    lengths = torch.tensor([len(s) for s in sequences])
    assert len(sequences) > 0, "a pack holds at least one sequence"
    assert int(lengths.min()) > 0, "a pack holds no empty sequence"
    starts_N1 = torch.zeros(len(sequences) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=starts_N1[1:])
    input_ids_T = torch.cat(list(sequences)).to(torch.int64)
    if segments is None:
        segment_ids_T = torch.zeros_like(input_ids_T)
    else:
        segment_ids_T = torch.cat(list(segments)).to(torch.int64)
    return PackedBatch(
        input_ids_T=input_ids_T,
        position_ids_T=positions_of(starts_N1),
        segment_ids_T=segment_ids_T,
        starts_N1=starts_N1,
        longest=int(lengths.max()),
    )


def positions_of(starts_N1: Tensor) -> Tensor:
    """Positions from 0 within each sequence, int64, shape T."""
    starts = starts_N1.to(torch.int64)
    lengths_N = starts.diff()
    return torch.arange(int(starts[-1]), device=starts.device) - torch.repeat_interleave(
        starts[:-1], lengths_N
    )


def unpack(values_T: Tensor, starts_N1: Tensor) -> list[Tensor]:
    """Views of the first axis, one a sequence: the inverse of `pack`."""
    return list(torch.split(values_T, starts_N1.diff().tolist()))


def to_padded(values_T: Tensor, starts_N1: Tensor, *, fill: float = 0) -> Tensor:
    """Values as (B, S, ...), padded at the right with `fill`; for the edges only."""
    return torch.nn.utils.rnn.pad_sequence(
        unpack(values_T, starts_N1), batch_first=True, padding_value=fill
    )


def from_padded(input_ids_BS: Tensor, attention_mask_BS: Tensor) -> PackedBatch:
    """A pack of the real tokens of a padded grid, whichever side the padding is on."""
    keep_BS = attention_mask_BS.bool()
    return pack([row[keep] for row, keep in zip(input_ids_BS, keep_BS, strict=True)])
