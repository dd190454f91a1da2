"""Which sequences share a pack: best fit by counting, on lengths alone.

The outcome depends on how many sequences there are of each length and on nothing else, so it is
found once. Each epoch then deals the sequences of a length anew over the places of that length.

Shape legend: S places, one a sequence; P packs; P1 = P + 1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    """Fill packs by best fit, longest first: each sequence goes where least room is left over.

    Sequences of one length are placed together. The fullest packs with room for one take as
    many as they hold (after the first, the same pack is still the best fit), so the work grows
    with the number of different lengths and of different rests, not with the sequences: ten
    million take about as long as sorting them.

    Args:
        lengths_S: Tokens of each sequence, in any order.
        capacity_tokens: Most tokens in a pack.

    Raises:
        ValueError: A length is below 1 or above the capacity.

    Source:
        Best-fit decreasing: Johnson 1973, "Near-optimal bin packing algorithms".
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
    pack_of_place_S = np.empty(len(lengths_S), np.int64)
    open_packs = _OpenPacks(capacity_tokens)
    place = 0
    for length in range(longest, 0, -1):
        count = int(counts[length])
        if count:
            open_packs.put(length, pack_of_place_S[place : place + count])
            place += count
    places_S = np.argsort(pack_of_place_S, kind="stable")
    sizes_P = np.bincount(pack_of_place_S, minlength=open_packs.num_packs)
    starts_P1 = np.zeros(open_packs.num_packs + 1, np.int64)
    np.cumsum(sizes_P, out=starts_P1[1:])
    return PackShapes(places_S=places_S, starts_P1=starts_P1)


def longest_first(
    lengths_S: NDArray[np.signedinteger], rng: np.random.Generator
) -> NDArray[np.int64]:
    """The sequence at each place: by length, longest first, equals in random order."""
    shuffled_S = rng.permutation(len(lengths_S))
    return shuffled_S[np.argsort(-lengths_S[shuffled_S], kind="stable")]


class _OpenPacks:
    """Packs by the room left in them."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_packs = 0
        self.packs_by_room: dict[int, NDArray[np.int64]] = {}
        self.rooms = 0  # bit r is set while some pack has room r: an ordered set in one integer

    def put(self, length: int, pack_of_place: NDArray[np.int64]) -> None:
        """Place `len(pack_of_place)` sequences of one length, writing down each one's pack."""
        done, count = 0, len(pack_of_place)
        while done < count:
            room, packs = self._take_fullest(length, count - done)
            each = room // length
            num_full = min(len(packs), (count - done) // each)
            end = done + num_full * each
            pack_of_place[done:end] = np.repeat(packs[:num_full], each)
            self._give_back(room - each * length, packs[:num_full])
            if num_full < len(packs) and end < count:  # the last sequences, fewer than a pack holds
                pack_of_place[end:] = packs[num_full]
                self._give_back(room - (count - end) * length, packs[num_full : num_full + 1])
                num_full, end = num_full + 1, count
            self._give_back(room, packs[num_full:])
            done = end

    def _take_fullest(self, length: int, count: int) -> tuple[int, NDArray[np.int64]]:
        """The fullest packs with room for `length`, or new ones, enough for `count`."""
        fitting = self.rooms >> length
        if not fitting:
            num_new = -(-count // (self.capacity_tokens // length))
            first, self.num_packs = self.num_packs, self.num_packs + num_new
            return self.capacity_tokens, np.arange(first, self.num_packs)
        room = length + (fitting & -fitting).bit_length() - 1
        self.rooms ^= 1 << room
        return room, self.packs_by_room.pop(room)

    def _give_back(self, room: int, packs: NDArray[np.int64]) -> None:
        """Keep packs for shorter sequences."""
        if len(packs) == 0 or room == 0:
            return
        held = self.packs_by_room.get(room)
        self.packs_by_room[room] = packs if held is None else np.concatenate([held, packs])
        self.rooms |= 1 << room
