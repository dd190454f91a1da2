"""The largest pass that a run can come to, tried before its first step.

A run that is to end for want of memory ends at its first second then, and not at its longest batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

import torch
from torch import nn

from bertsmith.batch import StepShare
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.micro_batch import OutOfMemoryError, give_back_memory, is_out_of_memory
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.step import BatchT, try_step


@dataclass(frozen=True, kw_only=True)
class Trial(Generic[BatchT]):
    """What is tried."""

    largest: Callable[[int | None], BatchT]
    """A pass of at most so many tokens that needs as much memory as any of the run; None: a whole
    pack."""

    packs_per_step: int
    """Of one rank: the second adds to the gradients of the first, which are held meanwhile."""

    later_bytes: int = 0
    """What the run holds from its first save on, in the memory that it trains in."""


def try_pass(
    trial: Trial[BatchT],
    strategy: Strategy,
    optimizer: AdamW,
    compute: Compute,
    *,
    max_tokens: int | None,
) -> None:
    """Run the largest pass forward and back, with all in place that is held besides it.

    Nothing is left of it: no gradient, no statistics, no random number drawn. It takes as long as
    a pass does.

    Args:
        trial: What is tried.
        strategy: Holds the model.
        optimizer: Of its parameters, whose gradients are empty before and after.
        compute: Device and format.
        max_tokens: Of a pass, as in training.

    Raises:
        OutOfMemoryError: On every rank: some rank had too little memory.
    """
    largest = trial.largest(max_tokens)
    at_once = strategy.packs_at_once // strategy.world.size  # dp feeds several devices
    packs = [largest] * at_once
    if trial.packs_per_step > 1 or max_tokens is not None:
        packs = [largest.filler()] * at_once + packs
    devices = [compute.device] if compute.device.type == "cuda" else []
    with (
        _held(trial.later_bytes, compute.device, strategy.world),
        torch.random.fork_rng(devices=devices),
        _same_buffers(strategy.model),
    ):
        try_step(strategy, StepShare.of_all(packs), optimizer, compute=compute)


@contextmanager
def _held(num_bytes: int, device: torch.device, world: World) -> Iterator[None]:
    """Within the block so much memory is taken.

    Raises:
        OutOfMemoryError: On every rank, if some rank has not as much.
    """
    block, is_refused = None, False
    try:
        block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_refused = True
    if world.sums([is_refused])[0]:
        give_back_memory(device)
        raise OutOfMemoryError
    try:
        yield
    finally:
        del block


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """A batch norm's statistics are after the block as they were before it."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
