"""Texts as token sequences, and sequences as packs: what fine-tuning and prediction feed on.

An example is a text or a pair, or, of one that is longer than the model reads, a window of it.

Shape legend: T tokens of all examples end to end, N examples, N1 = N + 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch, PackedBatch, StepShare, pack

BatchT = TypeVar("BatchT", LabelledBatch, MaskedBatch)

TEXTS_AT_ONCE = 2048
"""Texts handed to the tokenizer in one call: bounds the memory of its bulky answers."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Tokenised texts or pairs, special tokens included, end to end in the table's order."""

    input_ids_T: Tensor
    """Token ids, int32."""

    segment_ids_T: Tensor | None
    """0 for the first text, 1 for the second, int8; None where there are no pairs."""

    starts_N1: Tensor
    """Where each example starts, then T, int64."""

    owners_N: Tensor
    """The row that each example comes from, int64, ascending."""

    num_cut: int
    """Rows that were too long and lost their end."""

    tokens_cut: int
    """Tokens they lost."""

    def __len__(self) -> int:
        """Examples."""
        return len(self.starts_N1) - 1

    @property
    def num_windowed(self) -> int:
        """Rows that are read in several windows."""
        return int((self.owners_N.bincount() > 1).sum())

    @property
    def lengths_N(self) -> Tensor:
        """Tokens of each example."""
        return self.starts_N1.diff()

    def pack(self, rows: Sequence[int]) -> PackedBatch:
        """Some examples end to end, in the order given."""
        bounds = [(int(self.starts_N1[r]), int(self.starts_N1[r + 1])) for r in rows]
        segments_T = self.segment_ids_T
        return pack(
            [self.input_ids_T[a:b] for a, b in bounds],
            segments=None if segments_T is None else [segments_T[a:b] for a, b in bounds],
        )


class ExampleTokenizer:
    """Tokenises texts or pairs; those that are too long are cut, or read in windows.

    Cut, a pair loses tokens from its longer text first, as with `truncation="longest_first"` in
    transformers; a text loses its end. In windows, a pair's second text moves on and the first
    stands before each; is the first too long for that, the pair is cut. Special tokens are never
    lost.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_sequence_tokens: int,
        overlap_tokens: int | None = None,
    ) -> None:
        """Set up two copies: one that never cuts, and one for what has to be cut.

        Args:
            tokenizer: Whose post-processor adds the special tokens. Left as it is; padding and
                cutting that are stored in it are not followed.
            max_sequence_tokens: Most tokens of an example, special ones included.
            overlap_tokens: That a window shares with the one before, of the text that moves on;
                None: no windows.
        """
        self._overlap_tokens = overlap_tokens
        self._max_sequence_tokens = max_sequence_tokens
        self._whole = Tokenizer.from_str(tokenizer.to_str())
        self._whole.no_padding()
        self._whole.no_truncation()
        self._cutting = Tokenizer.from_str(self._whole.to_str())
        self._cutting.enable_truncation(max_sequence_tokens, strategy="longest_first")
        self._num_special_of_pair = self._whole.num_special_tokens_to_add(is_pair=True)
        self._sliding = Tokenizer.from_str(self._whole.to_str())

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Examples:
        """Tokenise texts, or pairs of a text and its second, and count what was cut."""
        ids: list[np.ndarray] = [np.zeros(0, np.int32)]
        segments: list[np.ndarray] = [np.zeros(0, np.int8)]
        lengths: list[int] = [0]
        owners: list[int] = []
        num_cut = tokens_cut = 0
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            end = start + TEXTS_AT_ONCE
            some: list[str | tuple[str, str]] = list(texts[start:end])
            if pairs is not None:
                some = list(zip(texts[start:end], pairs[start:end], strict=True))
            encoded = self._whole.encode_batch_fast(some)
            for row, (one, whole) in enumerate(zip(some, encoded, strict=True), start=start):
                windows = [whole]
                if len(whole) > self._max_sequence_tokens:
                    windows = self._windows(one)
                    if len(windows) == 1:
                        num_cut += 1
                        tokens_cut += len(whole) - len(windows[0])
                for encoding in windows:
                    lengths.append(len(encoding))
                    owners.append(row)
                    ids.append(np.array(encoding.ids, dtype=np.int32))
                    if pairs is not None:
                        segments.append(np.array(encoding.type_ids, dtype=np.int8))
        return Examples(
            input_ids_T=torch.from_numpy(np.concatenate(ids)),
            segment_ids_T=None if pairs is None else torch.from_numpy(np.concatenate(segments)),
            starts_N1=torch.tensor(lengths).cumsum(0),
            owners_N=torch.tensor(owners, dtype=torch.int64),
            num_cut=num_cut,
            tokens_cut=tokens_cut,
        )

    def _windows(self, one: str | tuple[str, str]) -> list[Encoding]:
        """A text that is too long: its windows, or what is left of it when it is cut."""
        overlap = self._overlap_tokens
        if overlap is None:
            return [_encoded(self._cutting, one)]
        strategy = "only_first"
        if not isinstance(one, str):
            strategy = "only_second"
            first = len(self._whole.encode(one[0], add_special_tokens=False))
            # Each window must bring at least as much of the second text as it repeats.
            room = self._max_sequence_tokens - self._num_special_of_pair - first
            if room < max(1, 2 * overlap):
                return [_encoded(self._cutting, one)]
        self._sliding.enable_truncation(
            self._max_sequence_tokens, stride=overlap, strategy=strategy
        )
        first_window = _encoded(self._sliding, one)
        return [first_window, *first_window.overflowing]


def _encoded(tokenizer: Tokenizer, one: str | tuple[str, str]) -> Encoding:
    return tokenizer.encode(one) if isinstance(one, str) else tokenizer.encode(*one)


def packs_by_length(
    lengths_N: Tensor, rows: Sequence[int], *, tokens_per_pack: int
) -> list[list[int]]:
    """Share rows out over packs, longest first: like lengths meet, which attention likes.

    The longest come first so that a batch too big for the memory fails at once. A row longer
    than a pack gets one of its own.
    """
    packs: list[list[int]] = []
    room = 0
    lengths = lengths_N.tolist()
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        if not packs or lengths[row] > room:
            packs.append([])
            room = tokens_per_pack
        packs[-1].append(row)
        room -= lengths[row]
    return packs


def even_packs(
    lengths_N: Tensor, rows: Sequence[int], *, tokens_per_pack: int, at_once: int
) -> list[list[int]]:
    """Share rows out over a multiple of `at_once` packs of like numbers of tokens, longest first.

    The order of the rows is that of `packs_by_length`, whatever the number of packs. Too few rows
    make fewer packs.
    """
    if at_once == 1:
        return packs_by_length(lengths_N, rows, tokens_per_pack=tokens_per_pack)
    lengths = lengths_N.tolist()
    ordered = sorted(rows, key=lambda r: (-lengths[r], r))
    ends = np.cumsum([lengths[r] for r in ordered])
    middles = ends - np.array([lengths[r] for r in ordered]) / 2
    most = max(tokens_per_pack, lengths[ordered[0]])
    num_packs = at_once * -(-int(ends[-1]) // (at_once * tokens_per_pack))
    while True:
        pack_of_row = (middles * num_packs / ends[-1]).astype(np.int64)
        packs = [[ordered[i] for i in np.flatnonzero(pack_of_row == p)] for p in range(num_packs)]
        packs = [some for some in packs if some]
        if all(sum(lengths[r] for r in some) <= most for some in packs):
            return packs
        num_packs += at_once


class Steps(ABC, Generic[BatchT]):
    """What each optimizer step sees: a pure function of (seed, step).

    Every epoch is a new order of all examples, cut into steps whose sizes differ by one at most,
    so that no step of an epoch is a small and noisy rest.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        examples_per_step: int,
        tokens_per_pack: int,
        seed: int,
        at_once: int = 1,
    ) -> None:
        """Nothing is computed yet.

        Args:
            examples: The training part.
            examples_per_step: Most examples behind one step.
            tokens_per_pack: Most tokens in one forward and backward pass.
            seed: The order follows from it.
            at_once: Devices among which a step's packs are shared out.
        """
        self._at_once = at_once
        self._examples = examples
        self._tokens_per_pack = tokens_per_pack
        self._seed = seed
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))
        self._num_rows = len(examples)
        self.steps_per_epoch = -(-len(examples) // examples_per_step)

    def rows(self, step: int) -> list[int]:
        """Examples of one step, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            order = torch.from_numpy(generator.permutation(self._num_rows))
            self._order = (epoch, order)
        start, end = ((position + i) * self._num_rows // self.steps_per_epoch for i in (0, 1))
        return [int(r) for r in self._order[1][start:end]]

    def batches(self, step: int) -> list[BatchT]:
        """The packs of one step, counted from 0."""
        return list(self.share(step, rank=0, num_ranks=1).packs)

    def share(self, step: int, *, rank: int, num_ranks: int) -> StepShare[BatchT]:
        """A rank's packs of one step, counted from 0."""
        packs = self.packs(step)
        lengths = [int(self._examples.lengths_N[some].sum()) for some in packs]
        numbers = range(rank, len(packs), num_ranks)
        mine: list[BatchT] = []
        for number in numbers:
            batch = self._batch(packs[number])
            first_row = sum(lengths[:number])
            mine.append(replace(batch, inputs=replace(batch.inputs, first_row=first_row)))
        if len(mine) < -(-len(packs) // num_ranks):
            mine.append(self._batch([packs[0][-1]]).filler())
        return StepShare(packs=mine, numbers=numbers, num_packs=len(packs))

    def alone(self, batch: BatchT) -> BatchT:
        """The batch as a step of its own."""
        return batch

    def packs(self, step: int) -> list[list[int]]:
        """The examples of each pack of one step, counted from 0."""
        return even_packs(
            self._examples.lengths_N,
            self.rows(step),
            tokens_per_pack=self._tokens_per_pack,
            at_once=self._at_once,
        )

    @abstractmethod
    def _batch(self, rows: list[int]) -> BatchT:
        """A pack of some examples with what is to be learned from them."""


class TrainingSteps(Steps[LabelledBatch]):
    """Steps of texts that have a target each."""

    def __init__(
        self,
        examples: Examples,
        labels_N: Tensor,
        *,
        examples_per_step: int,
        tokens_per_pack: int,
        seed: int,
        at_once: int = 1,
        weights_N: Tensor | None = None,
    ) -> None:
        """As `Steps`.

        Args:
            examples: The training part.
            labels_N: Their targets, as in `LabelledBatch`.
            examples_per_step: Most examples behind one step.
            tokens_per_pack: Most tokens in one forward and backward pass.
            seed: The order follows from it.
            at_once: Devices among which a step's packs are shared out.
            weights_N: Weights of the loss's terms, as in `LabelledBatch`.
        """
        super().__init__(
            examples,
            examples_per_step=examples_per_step,
            tokens_per_pack=tokens_per_pack,
            seed=seed,
            at_once=at_once,
        )
        self._labels_N, self._weights_N = labels_N, weights_N

    def _batch(self, rows: list[int]) -> LabelledBatch:
        batch = labelled_batch(self._examples, self._labels_N, rows)
        if self._weights_N is None:
            return batch
        return replace(batch, weights_N=self._weights_N[batch.rows_N])


def evaluation_packs(
    examples: Examples, *, tokens_per_pack: int
) -> Iterator[tuple[list[int], PackedBatch]]:
    """Every example once, by length: which ones a pack holds, and the pack."""
    rows = range(len(examples))
    for some in packs_by_length(examples.lengths_N, rows, tokens_per_pack=tokens_per_pack):
        yield some, examples.pack(some)


def labelled_batch(examples: Examples, labels_N: Tensor, rows: list[int]) -> LabelledBatch:
    """A pack of some examples, in the order given, with their targets."""
    rows_N = torch.tensor(rows)
    return LabelledBatch(inputs=examples.pack(rows), labels_N=labels_N[rows_N], rows_N=rows_N)
