"""Packs in parts that fit into memory: the same step, in more passes.

A part holds whole sequences, its tokens keep the dropout they have in the pack, and losses are
sums: how a step is cut changes nothing but rounding.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch

from bertsmith.parallel.world import World
from bertsmith.train.memory_reuse import trim


class Cuttable(Protocol):
    """A pack that can be cut between sequences."""

    def cut(self, max_tokens: int) -> list[Self]:
        """Parts of at most so many tokens, whole sequences each."""
        ...

    def filler(self) -> Self:
        """A part of it that has no targets."""
        ...


PackT = TypeVar("PackT", bound=Cuttable)


class OutOfMemoryError(Exception):
    """A step did not fit into the memory of some rank; nothing of it is left anywhere."""


class LoneOutOfMemoryError(Exception):
    """This rank has too little memory for a pass in which the others wait for it.

    What they wait for lies deep in the pass (fsdp gathers and spreads parameters block by block),
    so that it can be neither finished nor done over.
    """

    def __init__(self, rank: int) -> None:
        """Say which."""
        super().__init__(f"rank {rank} has run out of memory")
        self.rank = rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[PackT]):
    """A part of a pack."""

    batch: PackT
    pack: int | None
    """Place of the pack among the rank's own; None for a filler."""


def cut_packs(packs: Sequence[PackT], *, max_tokens: int | None, world: World) -> list[Part[PackT]]:
    """A rank's packs in parts, as many on every rank.

    Args:
        packs: The rank's.
        max_tokens: Of a part, if it has more than one sequence; None leaves packs whole.
        world: Ranks that go through their parts together.
    """
    if max_tokens is None:
        return [Part(batch=pack, pack=n) for n, pack in enumerate(packs)]
    parts = [
        Part(batch=part, pack=n) for n, pack in enumerate(packs) for part in pack.cut(max_tokens)
    ]
    missing = world.largest(len(parts)) - len(parts)
    return parts + [Part(batch=parts[0].batch.filler(), pack=None)] * missing


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocation that failed, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # oneDNN has no words of its own for it.
    words = ("DefaultCPUAllocator", "could not create a primitive", "could not execute a primitive")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def give_back_memory(device: torch.device) -> None:
    """Free what a pass that failed has left, so that a smaller one finds room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim()
