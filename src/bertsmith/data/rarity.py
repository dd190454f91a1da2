"""How much more often a rare type is predicted than a frequent one.

Shape legend: V ids; N sequences; L levels.
"""

import numpy as np
from numpy.typing import NDArray

LEVELS_PER_OCTAVE = 2
LOWEST, HIGHEST = -2, 4
"""Levels of the least and the most boosted types: half and four times the chance."""

NUM_LEVELS = HIGHEST - LOWEST + 1
BOOSTS_L: NDArray[np.float64] = 2.0 ** (np.arange(LOWEST, HIGHEST + 1) / LEVELS_PER_OCTAVE)

MOST_OFTEN = 0.5
"""No boost makes a chance larger than this: a word that is always hidden is context to none."""


def levels_of_types(counts_V: NDArray[np.int64], *, rare_boost: float) -> NDArray[np.int64]:
    """The level of each type, from 0: `BOOSTS_L` of it is frequency^-rare_boost over its mean.

    The mean is over the tokens of the corpus. The boost is rounded to a step of sqrt(2), and
    bounded; of a type that does not occur it is the highest.

    Args:
        counts_V: How often each id occurs.
        rare_boost: The exponent, over 0.
    """
    occurs_V = counts_V > 0
    power_V = np.where(occurs_V, counts_V, 1).astype(np.float64) ** -rare_boost
    mean = float((power_V * counts_V).sum()) / max(int(counts_V.sum()), 1)
    octaves_V = np.log2(power_V / mean, where=occurs_V, out=np.full(len(counts_V), np.inf))
    bounded_V = np.clip(LEVELS_PER_OCTAVE * octaves_V, LOWEST, HIGHEST)
    levels_V: NDArray[np.int64] = np.rint(bounded_V).astype(np.int64) - LOWEST
    return levels_V


def speeds(tokens_NL: NDArray[np.float64], *, largest_share: float) -> NDArray[np.float64]:
    """What the share of the units of each level is multiplied with, so that the whole keeps it.

    Boosts over their mean in the sequence, none so large that a unit would be predicted in more
    than `MOST_OFTEN` of the epochs (or `largest_share`, if that is more); what that takes from
    some, the others get.

    Args:
        tokens_NL: Tokens of each level in each sequence.
        largest_share: Of all epochs.

    Returns:
        Shape (N, L); tokens_NL * it sums to the tokens of the sequence.
    """
    most = max(1.0, MOST_OFTEN / largest_share)
    total_N = tokens_NL.sum(1)
    speeds_NL = np.broadcast_to(BOOSTS_L, tokens_NL.shape).copy()
    is_at_most_NL = np.zeros(tokens_NL.shape, np.bool_)
    for _ in range(NUM_LEVELS):
        free_N = total_N - most * (tokens_NL * is_at_most_NL).sum(1)
        weight_N = (tokens_NL * ~is_at_most_NL * BOOSTS_L).sum(1)
        scale_N = np.divide(free_N, weight_N, where=weight_N > 0, out=np.ones(len(total_N)))
        speeds_NL = np.where(is_at_most_NL, most, scale_N[:, None] * BOOSTS_L)
        if not (speeds_NL > most * (1 + 1e-12)).any():
            break
        is_at_most_NL |= speeds_NL > most * (1 + 1e-12)
    return speeds_NL
