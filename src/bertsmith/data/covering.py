"""Sampling without replacement over epochs, found for any epoch without a state.

The units of a group (the tokens, words or spans of a piece of a document) stand in a queue. Each
epoch takes its share of tokens from the front, shuffles what it took, and puts it at the back.
That is all: what waits longest comes next, so nothing is left out and nothing comes twice.

Exactly: the queue is laid along a line on which a lap has length 1, and unit u of w_u of the
group's n tokens has an arc of w_u / n in every lap and a point at the share `phase` of that arc.
With C_e the sum of the shares of the epochs before e, epoch e predicts the units whose points lie
in [C_e, C_{e+1}). The next lap's order is this lap's, where the units that one epoch took, which
stand side by side, are shuffled among themselves: any unit that is not lighter than the last of
them may become the last.

0. *Never twice at once.* The next point of a unit that epoch e took is past C_e + 1 - w / n, w the
   tokens of the first unit that e took. Where e's share and a unit are so large that this might be
   below C_{e+1}, what e took is not shuffled, and each next point is 1 later exactly.
1. *Balance.* A unit has one point in every lap [r, r + 1). So after e epochs it has been predicted
   floor(C_e) or ceil(C_e) times: no two units of the corpus differ by more than one.
2. *Coverage.* If epochs e to f - 1 have shares of 1 in sum, they predict every unit. For one last
   predicted in epoch d < e, in lap r: its arc of lap r + 1 is one of those that epoch d took in
   lap r, shifted by 1, and its point there is no later than the last point of these, shifted: the
   last of them is not lighter than the one that was last before, so its point is no later, and all
   others have arcs that end before it begins. So it is below C_{d+1} + 1 <= C_e + 1 <= C_f. One
   never predicted before e has its point of lap 0 below 1 <= C_f.
3. *Exact share.* The units taken in the first e epochs are those whose points lie below C_e. All
   but one of them lie wholly below it, or all but one of the others wholly above: the tokens
   predicted differ from n C_e by less than one unit, and as `phase` is drawn evenly from [0, 1),
   the unit across C_e is taken with the chance that is the share of it below: n C_e on average.
   For units of one token: floor or ceil of n C_e.

If 1 / share is a whole number, coverage leaves no choice: who is predicted together in one lap is
in all (n tokens in K = 1 / share epochs, all n in any K epochs, so each exactly every K epochs).
Otherwise the borders between epochs wander over the laps, and shuffled parts mix.

A group may have a `speed` h, which multiplies its shares and so C_e.

Shape legend: U units; G groups; E epochs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.keyed_random import child_keys

RANDOM_BITS = 40
PHASE_BITS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitQueues:
    """Units and the groups whose queues they stand in."""

    groups_U: NDArray[np.int64]
    """The group of each unit."""

    tokens_U: NDArray[np.int64]
    """Tokens of each unit, at least 1."""

    keys_U: NDArray[np.uint64]
    """Names the random numbers of each unit."""

    speeds_G: NDArray[np.float64]
    """What the share of each group is multiplied with; over 0."""

    keys_G: NDArray[np.uint64]
    """Names the random numbers of each group."""


def units_in_epoch(queues: UnitQueues, laps_E: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which units are predicted in an epoch.

    The order of the queues is found lap after lap from the first, a sort each: laps are few, as
    ten epochs at 15 % are one and a half.

    Args:
        queues: The units.
        laps_E: C_0 = 0, C_1, ... to C_{e+1} for epoch e: sums of shares, each under 1.

    Returns:
        Shape (U,).
    """
    epoch = len(laps_E) - 2
    chosen_U = np.zeros(len(queues.groups_U), np.bool_)
    if len(chosen_U) == 0:
        return chosen_U
    num_groups = len(queues.speeds_G)
    tokens_G = np.bincount(queues.groups_U, queues.tokens_U, num_groups)
    before_G = np.cumsum(tokens_G) - tokens_G
    groups = np.sort(queues.groups_U)  # of each place: a group's places lie together
    before, tokens, speeds = before_G[groups], tokens_G[groups], queues.speeds_G[groups]
    phases = _phases(queues.keys_G)[groups]
    random = _random(queues.keys_U, 0)
    places = np.argsort(
        (queues.groups_U.astype(np.uint64) << np.uint64(RANDOM_BITS)) | random, kind="stable"
    )
    largest_G = np.zeros(num_groups)
    np.maximum.at(largest_G, queues.groups_U, queues.tokens_U)
    largest = (largest_G / np.maximum(tokens_G, 1))[groups]
    shares_E = np.diff(laps_E)
    last_lap = int(laps_E[-1] * queues.speeds_G.max())
    for lap in range(last_lap + 1):
        sizes = queues.tokens_U[places]
        arcs = np.cumsum(sizes) - sizes - before
        points = lap + (arcs + phases * sizes) / tokens
        epochs = np.searchsorted(laps_E, points / speeds, side="right") - 1
        chosen_U[places[epochs == epoch]] = True
        if lap < last_lap:
            random = _random(queues.keys_U, lap + 1)[places]
            # By the share of the epoch that took them: another epoch is to find the same order.
            may_shuffle = shares_E[np.minimum(epochs, epoch)] * speeds + largest <= 1.0
            random = np.where(may_shuffle, random, np.arange(len(places), dtype=np.uint64))
            places = places[_shuffle(groups, epochs, sizes, random)]
    return chosen_U


def _shuffle(
    groups: NDArray[np.int64],
    epochs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    random: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Where each place of the next lap takes its unit from, shuffled within group and epoch."""
    is_first = np.ones(len(groups), np.bool_)
    is_first[1:] = (np.diff(groups) != 0) | (np.diff(epochs) != 0)
    blocks = np.cumsum(is_first) - 1
    keys = (blocks.astype(np.uint64) << np.uint64(RANDOM_BITS + 1)) | random
    if sizes.min() != sizes.max():
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(groups)) - 1
        may_be_last = sizes >= sizes[lasts][blocks]
        drawn = np.where(may_be_last, random + np.uint64(1), np.uint64(0))
        is_last = may_be_last & (drawn == np.maximum.reduceat(drawn, firsts)[blocks])
        keys |= is_last.astype(np.uint64) << np.uint64(RANDOM_BITS)
    return np.argsort(keys, kind="stable")


def _random(keys: NDArray[np.uint64], lap: int) -> NDArray[np.uint64]:
    return child_keys(keys, lap) >> np.uint64(64 - RANDOM_BITS)


def _phases(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Odd multiples of 2^-21, which no sum of decimal shares meets: rounding is no matter."""
    drawn = child_keys(keys, 0) >> np.uint64(64 - PHASE_BITS)
    return (drawn.astype(np.float64) + 0.5) * 2.0**-PHASE_BITS
