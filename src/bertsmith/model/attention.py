"""Attention over packed sequences: one function, several bodies, each token sees its own sequence.

Shape legend: T packed tokens, N sequences, H heads, K head width.
"""

import math

import torch
from torch import Tensor

from bertsmith.model.dropout import keep_mask


def attention(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THK: Tensor,
    starts_N1: Tensor,
    *,
    drop_prob: float,
    seed: int | None,
    site: int,
) -> Tensor:
    """softmax(QK' / sqrt(K)) V within each sequence, shape (T, H, K); plain for now.

    A None seed means no dropout.
    """
    return reference_attention(
        query_THK, key_THK, value_THK, starts_N1, drop_prob=drop_prob, seed=seed, site=site
    )


def reference_attention(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THK: Tensor,
    starts_N1: Tensor,
    *,
    drop_prob: float,
    seed: int | None,
    site: int,
) -> Tensor:
    """The whole T x T grid under a block mask: slow, and what the other bodies are tested by."""
    lengths_N = starts_N1.to(torch.int64).diff()
    sequence_T = torch.repeat_interleave(
        torch.arange(len(lengths_N), device=lengths_N.device), lengths_N
    )
    same_TT = sequence_T[:, None] == sequence_T[None, :]
    query_HTK, key_HTK, value_HTK = (x.transpose(0, 1) for x in (query_THK, key_THK, value_THK))
    scores_HTT = query_HTK @ key_HTK.transpose(1, 2) / math.sqrt(query_THK.shape[-1])
    probs_HTT = scores_HTT.float().masked_fill(~same_TT, -torch.inf).softmax(-1)
    if seed is not None and drop_prob > 0.0:
        keep = keep_mask(
            tuple(probs_HTT.shape),
            drop_prob=drop_prob,
            seed=seed,
            site=site,
            device=probs_HTT.device,
        )
        probs_HTT = probs_HTT * keep / (1.0 - drop_prob)
    return (probs_HTT.to(value_HTK.dtype) @ value_HTK).transpose(0, 1)
