"""Random numbers by name: a hash of what they are for, so that any of them is found by itself.

Source: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each key: splitmix64's finisher."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def child_keys(
    parents: NDArray[np.uint64], numbers: NDArray[np.signedinteger] | int
) -> NDArray[np.uint64]:
    """Keys of the numbered children of keys: as different from each other as from their parents.

    Args:
        parents: Keys.
        numbers: At least 0; broadcasts with them.
    """
    steps = np.atleast_1d(np.asarray(numbers)).astype(np.uint64) + np.uint64(1)
    return mixed(parents + steps * GOLDEN)


def key_of(*numbers: int) -> NDArray[np.uint64]:
    """The key that some numbers, at least 0, name together: one element."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = child_keys(key, np.array([number & ((1 << 63) - 1)]))
    return key


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) of random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
