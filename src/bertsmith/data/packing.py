"""Which sequences share a pack: every pack equally full, with long and short ones mixed alike.

The outcome depends on how many sequences there are of each length and on nothing else, so it is
found once. Each epoch then deals the sequences of a length anew over the places of that length.

Shape legend: S places, one a sequence; P packs; P1 = P + 1; L lengths from 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROWTH = 400
"""One pack in so many may be more than needed: efficiency lost, 0.25 %."""

LARGE_PIECES = 8
"""Up to so many sequences a pack, their number bounds that of the packs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShapes:
    """Packs as lists of places; place k is for the k-th longest sequence."""

    places_S: NDArray[np.int64]
    """Places, pack after pack; ascending within a pack, so its longest sequence comes first."""

    starts_P1: NDArray[np.int64]
    """Where each pack starts in `places_S`, then S."""

    @property
    def num_packs(self) -> int:
        """Packs, none empty."""
        return len(self.starts_P1) - 1

    def places_of(self, pack: int) -> NDArray[np.int64]:
        """The places of one pack, longest sequence first."""
        return self.places_S[self.starts_P1[pack] : self.starts_P1[pack + 1]]


def plan_packs(lengths_S: NDArray[np.signedinteger], *, capacity_tokens: int) -> PackShapes:
    """Fill as few packs as hold the sequences, and fill them evenly.

    Longest first, each sequence goes where most room is left (worst fit decreasing, which
    Graham 1969 calls LPT). Best fit would fill packs as well, but with sequences of one length:
    steps would see only long or only short texts, and ranks would get unequal attention work. Here
    every pack is a small likeness of the corpus, and short sequences even out the rest.

    Sequences of one length are placed together, one a pack and round, so the work grows with the
    number of different lengths times packs: ten million sequences take seconds.

    Args:
        lengths_S: Tokens of each sequence, in any order.
        capacity_tokens: Most tokens in a pack.

    Raises:
        ValueError: A length is below 1 or above the capacity.

    Source:
        Graham 1969, "Bounds on multiprocessing timing anomalies".
    """
    if len(lengths_S) == 0:
        return PackShapes(places_S=np.zeros(0, np.int64), starts_P1=np.zeros(1, np.int64))
    shortest, longest = int(lengths_S.min()), int(lengths_S.max())
    if shortest < 1 or longest > capacity_tokens:
        raise ValueError(
            f"lengths run from {shortest} to {longest}; a pack of {capacity_tokens} tokens holds "
            f"sequences of 1 to {capacity_tokens}"
        )
    counts = np.bincount(lengths_S, minlength=longest + 1)
    num_packs, pack_of_place_S = _fewest_packs(counts, capacity_tokens)
    places_S = _order(pack_of_place_S, most=num_packs)
    starts_P1 = np.zeros(num_packs + 1, np.int64)
    np.cumsum(np.bincount(pack_of_place_S, minlength=num_packs), out=starts_P1[1:])
    return PackShapes(places_S=places_S, starts_P1=starts_P1)


def _fewest_packs(
    counts: NDArray[np.signedinteger], capacity_tokens: int
) -> tuple[int, NDArray[np.int64]]:
    """A number of packs that do, where one in `GROWTH` fewer do not, and the pack of each place."""
    too_few = _surely_needed(counts, capacity_tokens) - 1
    num_packs = too_few + 1
    step = 1 + num_packs // GROWTH
    growth = step
    while (dealt_S := _deal(counts, num_packs, capacity_tokens)) is None:
        too_few = num_packs
        num_packs += growth
        growth *= 2
    while num_packs - too_few > step:
        between = (too_few + num_packs) // 2
        fewer_S = _deal(counts, between, capacity_tokens)
        if fewer_S is None:
            too_few = between
        else:
            num_packs, dealt_S = between, fewer_S
    return num_packs, dealt_S


def _surely_needed(counts: NDArray[np.signedinteger], capacity_tokens: int) -> int:
    """A number of packs below which no plan can be: by tokens, and by sequences too large to share.

    No more than k sequences longer than capacity / (k + 1) share a pack.
    """
    longer_L = counts[::-1].cumsum(dtype=np.int64)[::-1]  # sequences of at least each length
    by_tokens = -(-int(counts @ np.arange(len(counts))) // capacity_tokens)
    by_size = (
        -(-int(longer_L[capacity_tokens // (k + 1) + 1]) // k)
        for k in range(1, LARGE_PIECES + 1)
        if capacity_tokens // (k + 1) + 1 < len(counts)
    )
    return max(by_tokens, *by_size, 1)


def _deal(
    counts: NDArray[np.signedinteger], num_packs: int, capacity_tokens: int
) -> NDArray[np.int64] | None:
    """The pack of each place, longest sequences first; None if they do not fit so few packs."""
    filled_P = np.arange(num_packs)  # tokens * num_packs + pack, ascending: roomiest first
    dealt: list[NDArray[np.int64]] = []
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        fullest = (capacity_tokens - length + 1) * num_packs
        while left:
            num_now = int(np.searchsorted(filled_P[:left], fullest))
            if num_now == 0:
                return None
            taken, others_P = filled_P[:num_now], filled_P[num_now:]
            dealt.append(taken % num_packs)
            filled_P = np.concatenate([others_P, taken + length * num_packs])
            if len(others_P):
                filled_P.sort(kind="stable")  # two runs in order, which it merges
            left -= num_now
    return np.concatenate(dealt)


def longest_first(
    lengths_S: NDArray[np.signedinteger], rng: np.random.Generator
) -> NDArray[np.int64]:
    """The sequence at each place: by length, longest first, equals in random order."""
    shuffled_S = rng.permutation(len(lengths_S))
    longest = int(lengths_S.max(initial=0))
    return shuffled_S[_order(longest - lengths_S[shuffled_S], most=longest)]


def _order(values: NDArray[np.signedinteger], *, most: int) -> NDArray[np.int64]:
    """Places of the values from 0 to `most`, smallest first, equals as they come.

    numpy sorts two-byte numbers by radix, three to eight times as fast as longer ones.
    """
    narrow = values.astype(np.uint16) if most < 1 << 16 else values
    return np.argsort(narrow, kind="stable")
