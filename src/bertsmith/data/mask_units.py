"""What masking hides together: tokens, whole words, or spans of words.

Shape legend: T tokens of a pack; M those that may be predicted; W words; U units; N sequences.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.config import MaskingUnit
from bertsmith.data.keyed_random import child_keys, uniform

MOST_TOKENS_IN_WORD = 16
"""A longer word (an address of the web, a number, a text without spaces) is cut into such parts:
hidden whole, it would be its sequence's share for many epochs."""

SPAN_STOP_CHANCE = 0.2
MOST_WORDS_IN_SPAN = 10

_SPAN_ENDS = np.cumsum(SPAN_STOP_CHANCE * (1 - SPAN_STOP_CHANCE) ** np.arange(MOST_WORDS_IN_SPAN))
_SPAN_ENDS /= _SPAN_ENDS[-1]


class Units(NamedTuple):
    """The units of a pack, in its order."""

    firsts_U: NDArray[np.int64]
    """The first token of each, as a number among the M that may be predicted."""

    tokens_U: NDArray[np.int64]
    """Tokens of each, at least 1, side by side in the text."""

    sequences_U: NDArray[np.int64]
    """The sequence of the pack that each is in."""


def find_units(
    kind: MaskingUnit,
    *,
    positions_M: NDArray[np.int64],
    sequences_M: NDArray[np.int64],
    word_starts_T: NDArray[np.bool_] | None,
    keys_N: NDArray[np.uint64],
) -> Units:
    """The units of a pack; tokens that may not be predicted are in none, and part their neighbours.

    Args:
        kind: Which units.
        positions_M: Where the tokens are that may be predicted, ascending.
        sequences_M: The sequence that each of them is in.
        word_starts_T: Whether a token begins a word; None will do for tokens.
        keys_N: Names the random numbers of each sequence; spans are drawn from them.
    """
    num_tokens = len(positions_M)
    if kind == "token" or num_tokens == 0:
        every_M = np.arange(num_tokens)
        return Units(every_M, np.ones(num_tokens, np.int64), sequences_M)
    assert word_starts_T is not None
    parted_M = np.ones(num_tokens, np.bool_)
    parted_M[1:] = (np.diff(positions_M) != 1) | (np.diff(sequences_M) != 0)
    firsts_W = _cut_long(np.flatnonzero(parted_M | word_starts_T[positions_M]), num_tokens)
    if kind == "span":
        joined_W = ~_span_starts(sequences_M[firsts_W], keys_N) & ~parted_M[firsts_W]
        firsts_W = firsts_W[~joined_W]
    return Units(firsts_W, np.diff(firsts_W, append=num_tokens), sequences_M[firsts_W])


def _cut_long(firsts_W: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """Where words begin, and parts of too long ones."""
    parts_W = -(-np.diff(firsts_W, append=num_tokens) // MOST_TOKENS_IN_WORD)
    if parts_W.max() == 1:
        return firsts_W
    numbers = np.arange(parts_W.sum()) - np.repeat(np.cumsum(parts_W) - parts_W, parts_W)
    cut_W: NDArray[np.int64] = np.repeat(firsts_W, parts_W) + numbers * MOST_TOKENS_IN_WORD
    return cut_W


def _span_starts(sequences_W: NDArray[np.int64], keys_N: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each word begins a span, where the spans of a sequence follow each other.

    Source:
        Joshi et al. 2020 (SpanBERT), section 3.1: geometric lengths, p = 0.2, at most 10 words;
        as their code has it, longer ones are drawn again, so the mean is 3.8.
    """
    num_words = len(sequences_W)
    words_N = np.bincount(sequences_W, minlength=len(keys_N))
    before_N = np.cumsum(words_N) - words_N
    numbers_W = np.arange(num_words) - before_N[sequences_W]
    drawn_W = uniform(child_keys(keys_N[sequences_W], numbers_W))
    lengths_W = 1 + np.searchsorted(_SPAN_ENDS, drawn_W, side="right")  # of span k, for word k
    ends_W = np.cumsum(lengths_W)
    starts_W = ends_W - lengths_W
    starts_W -= starts_W[np.minimum(before_N, num_words - 1)][sequences_W]
    is_start_W = np.zeros(num_words, np.bool_)
    reached_W = starts_W < words_N[sequences_W]
    is_start_W[(starts_W + before_N[sequences_W])[reached_W]] = True
    return is_start_W
