"""Packs that need as much memory as any of a run: what is tried before it begins.

What a pack needs grows with its tokens, with the length of its sequences and with what a head
reads of it; never with which tokens they are. Shape legend: T packed tokens, N sequences, M masked
positions.
"""

import torch

from bertsmith.batch import LabelledBatch, MaskedBatch, PackedBatch, PairTargets, positions_of
from bertsmith.data.examples import Examples
from bertsmith.data.pieces import SequenceVocab


def largest_masked(
    vocab: SequenceVocab, *, tokens: int, longest: int, num_hidden: int, has_pairs: bool = False
) -> MaskedBatch:
    """A pack for pretraining.

    Args:
        vocab: Of the data.
        tokens: In the pack.
        longest: Of a sequence: all have as many, but for the last.
        num_hidden: Tokens to predict.
        has_pairs: Whether every sequence is a pair to judge.
    """
    ids_T = torch.full((tokens,), vocab.mask_id, dtype=torch.int64)
    inputs = _in_sequences(ids_T, longest)
    positions_M = torch.arange(num_hidden) * tokens // num_hidden
    pairs = None
    if has_pairs:
        positions_M = positions_M[~torch.isin(positions_M, inputs.starts_N1)]
        sequences_P = torch.arange(inputs.num_sequences)
        pairs = PairTargets(sequences_P=sequences_P, labels_P=torch.zeros_like(sequences_P))
    return MaskedBatch(
        inputs=inputs, positions_M=positions_M, targets_M=ids_T[positions_M], pairs=pairs
    )


def largest_labelled(
    examples: Examples, labels_N: torch.Tensor, *, tokens: int, longest: int
) -> LabelledBatch:
    """A pack for fine-tuning, of tokens that occur and a target that does; as `largest_masked`."""
    known_T = examples.input_ids_T
    ids_T = known_T[torch.arange(tokens) % len(known_T)].to(torch.int64)
    inputs = _in_sequences(ids_T, longest)
    rows_N = torch.arange(inputs.num_sequences)
    return LabelledBatch(inputs=inputs, labels_N=labels_N[torch.zeros_like(rows_N)], rows_N=rows_N)


def _in_sequences(ids_T: torch.Tensor, longest: int) -> PackedBatch:
    tokens = len(ids_T)
    starts = [*range(0, tokens, longest), tokens]
    starts_N1 = torch.tensor(starts, dtype=torch.int32)
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_of(starts_N1),
        segment_ids_T=torch.zeros_like(ids_T),
        starts_N1=starts_N1,
        longest=min(longest, tokens),
    )
