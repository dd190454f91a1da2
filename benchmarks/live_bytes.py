"""Counts the bytes that torch's CPU allocator has given out, and those that autograd holds.

Every allocation and release is an event of torch's profiler, those within operations included, so
this is for a CPU what `torch.cuda.max_memory_allocated` is for a GPU. What C code takes by malloc
(the kernels' scratch areas, oneDNN's own) is not seen; resident memory shows it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_PHASE = "phase: "


@dataclass
class LiveBytes:
    """What was found, once the `counted` block has ended."""

    peak_bytes: int = 0
    phase_peaks_bytes: dict[str, int] = field(default_factory=dict)
    """The highest point within each phase, what was allocated before it included."""


@contextmanager
def counted() -> Iterator[LiveBytes]:
    """Count what is allocated within the block; what was there before does not count."""
    found = LiveBytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    live, phases, changes = 0, [], []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_PHASE):
            start = event.start_ns()
            phases.append((event.name().removeprefix(_PHASE), start, start + event.duration_ns()))
    found.phase_peaks_bytes = {name: 0 for name, *_ in phases}
    for at, num_bytes in sorted(changes, key=lambda change: change[0]):
        live += num_bytes
        found.peak_bytes = max(found.peak_bytes, live)
        for name, start, end in phases:
            if start <= at <= end:
                found.phase_peaks_bytes[name] = max(found.phase_peaks_bytes[name], live)


def phase(name: str, work: Callable[[], object]) -> None:
    """Do some work under a name by which its peak is told."""
    with record_function(_PHASE + name):
        work()


@contextmanager
def held_for_backward() -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd holds, by address; parameters are left out."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or another would come to lie at its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        yield found
