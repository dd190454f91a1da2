"""Dropout whose randomness is an argument: a pure function of (seed, site), never of global state."""

import numpy as np
import torch
from torch import Tensor


def keep_mask(
    shape: tuple[int, ...], *, drop_prob: float, seed: int, site: int, device: torch.device
) -> Tensor:
    """Which elements survive, as a bool tensor; the same for the same seed and site.

    Args:
        shape: Shape of the mask.
        drop_prob: Chance that an element is dropped, 0 to 1.
        seed: The pack's dropout seed.
        site: Which dropout of the model this is; sites draw independent masks.
        device: Where the mask is used. Bits are the same on each device.
    """
    bits = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, site))))
    count = int(np.prod(shape))
    words = bits.integers(0, 1 << 16, size=count, dtype=np.uint16)
    keep = torch.from_numpy(words.astype(np.int32)) >= round(drop_prob * (1 << 16))
    return keep.view(shape).to(device)


def dropout(hidden: Tensor, *, drop_prob: float, seed: int | None, site: int) -> Tensor:
    """Zero elements with chance `drop_prob` and scale the rest; a None seed leaves all as it is."""
    if seed is None or drop_prob == 0.0:
        return hidden
    keep = keep_mask(
        tuple(hidden.shape), drop_prob=drop_prob, seed=seed, site=site, device=hidden.device
    )
    return hidden * keep / (1.0 - drop_prob)
