"""Texts as token sequences, and sequences as packs: what fine-tuning and prediction feed on.

Shape legend: T tokens of all examples end to end, N examples, N1 = N + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from bertsmith.batch import LabelledBatch, PackedBatch, pack

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

    num_cut: int
    """Examples that were too long and lost their end."""

    tokens_cut: int
    """Tokens they lost."""

    def __len__(self) -> int:
        """Examples."""
        return len(self.starts_N1) - 1

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


def encode_examples(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    *,
    max_sequence_tokens: int,
) -> Examples:
    """Tokenise texts or pairs, and cut those that are too long.

    A pair loses tokens from its longer text first, as with `truncation="longest_first"` in
    transformers; a text loses its end. Special tokens are never lost.

    Args:
        tokenizer: Whose post-processor adds the special tokens. Left as it is.
        texts: The first texts.
        pairs: The second texts, or None.
        max_sequence_tokens: Most tokens of an example, special ones included.
    """
    whole, cutting = Tokenizer.from_str(tokenizer.to_str()), Tokenizer.from_str(tokenizer.to_str())
    for each in (whole, cutting):
        each.no_padding()
        each.no_truncation()
    cutting.enable_truncation(max_sequence_tokens, strategy="longest_first")
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    lengths: list[int] = []
    num_cut = tokens_cut = 0
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        end = start + TEXTS_AT_ONCE
        some: list[str] | list[tuple[str, str]] = list(texts[start:end])
        if pairs is not None:
            some = list(zip(texts[start:end], pairs[start:end], strict=True))
        encodings: list[Encoding] = whole.encode_batch_fast(some)
        for i, encoding in enumerate(encodings):
            if len(encoding) > max_sequence_tokens:
                one = some[i]
                short = cutting.encode(one) if isinstance(one, str) else cutting.encode(*one)
                num_cut += 1
                tokens_cut += len(encoding) - len(short)
                encodings[i] = short
        lengths += [len(e) for e in encodings]
        ids.append(np.concatenate([np.array(e.ids, dtype=np.int32) for e in encodings]))
        if pairs is not None:
            segments.append(np.concatenate([np.array(e.type_ids, np.int8) for e in encodings]))
    starts_N1 = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=starts_N1[1:])
    return Examples(
        input_ids_T=torch.from_numpy(np.concatenate(ids) if ids else np.zeros(0, np.int32)),
        segment_ids_T=torch.from_numpy(np.concatenate(segments)) if segments else None,
        starts_N1=starts_N1,
        num_cut=num_cut,
        tokens_cut=tokens_cut,
    )


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


class TrainingSteps:
    """What each optimizer step sees: a pure function of (seed, step).

    Every epoch is a new order of all examples, cut into steps whose sizes differ by one at most,
    so that no step of an epoch is a small and noisy rest.
    """

    def __init__(
        self,
        examples: Examples,
        labels_N: Tensor,
        *,
        examples_per_step: int,
        tokens_per_pack: int,
        seed: int,
    ) -> None:
        """Nothing is computed yet.

        Args:
            examples: The training part.
            labels_N: Their class ids.
            examples_per_step: Most examples behind one step.
            tokens_per_pack: Most tokens in one forward and backward pass.
            seed: The order follows from it.
        """
        self._examples, self._labels_N = examples, labels_N
        self._tokens_per_pack = tokens_per_pack
        self._seed = seed
        self._order: tuple[int, Tensor] = (-1, labels_N)
        self.steps_per_epoch = -(-len(examples) // examples_per_step)

    def rows(self, step: int) -> list[int]:
        """Examples of one step, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            order = torch.from_numpy(generator.permutation(len(self._examples)))
            self._order = (epoch, order)
        start, end = ((position + i) * len(self._examples) // self.steps_per_epoch for i in (0, 1))
        return [int(r) for r in self._order[1][start:end]]

    def batches(self, step: int) -> list[LabelledBatch]:
        """The packs of one step, counted from 0."""
        return _labelled(
            self._examples, self._labels_N, self.rows(step), tokens_per_pack=self._tokens_per_pack
        )


def evaluation_batches(
    examples: Examples, labels_N: Tensor, *, tokens_per_pack: int
) -> Iterator[LabelledBatch]:
    """Every example once, by length; `rows_N` is the way back to the table's order."""
    rows = range(len(examples))
    for some in packs_by_length(examples.lengths_N, rows, tokens_per_pack=tokens_per_pack):
        yield _batch(examples, labels_N, some)


def _labelled(
    examples: Examples, labels_N: Tensor, rows: Sequence[int], *, tokens_per_pack: int
) -> list[LabelledBatch]:
    packs = packs_by_length(examples.lengths_N, rows, tokens_per_pack=tokens_per_pack)
    return [_batch(examples, labels_N, some) for some in packs]


def _batch(examples: Examples, labels_N: Tensor, rows: list[int]) -> LabelledBatch:
    rows_N = torch.tensor(rows)
    return LabelledBatch(inputs=examples.pack(rows), labels_N=labels_N[rows_N], rows_N=rows_N)
