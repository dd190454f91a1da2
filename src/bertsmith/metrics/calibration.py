"""Whether probabilities mean what they say, and the temperature that makes them.

Source:
    Guo et al. (2017), On calibration of modern neural networks.

Shape legend: N examples, C classes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

BINS = 15
"""Of equal width, as in the paper."""

LARGEST_TEMPERATURE = 20.0
"""Where every answer is right the best temperature is 0, where all are noise it has no end."""

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
SEARCH_STEPS = 60
"""Each leaves 62 % of an interval of ln(400): the last is below 1e-11."""


def calibration_error(chances_N: Tensor, is_right_N: Tensor) -> float:
    """Mean distance between a probability and how often it comes true, in `BINS` bins.

    Args:
        chances_N: Probability of an answer, in [0, 1].
        is_right_N: Whether the answer was right.
    """
    chances_N, right_N = chances_N.double(), is_right_N.double()
    bins_N = (chances_N * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # (low, high]
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins_N, right_N - chances_N)
    return float(gaps.abs().sum()) / max(len(chances_N), 1)


def best_temperature(nats_at: Callable[[float], float]) -> float:
    """The number to divide logits by so that their loss is least.

    The loss is convex in 1 / temperature, so that a search by golden section finds the one minimum.

    Args:
        nats_at: Loss of the logits divided by a temperature.
    """
    low, high = -math.log(LARGEST_TEMPERATURE), math.log(LARGEST_TEMPERATURE)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = nats_at(math.exp(left)), nats_at(math.exp(right))
    for _ in range(SEARCH_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = nats_at(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = nats_at(math.exp(right))
    return math.exp((low + high) / 2)
