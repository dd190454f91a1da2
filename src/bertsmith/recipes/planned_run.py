"""A run's memory as it is planned before the first step: what it needs, may use, and takes at once.

The same planner, asked in the same way, as `bertsmith plan`; what differs is that model and data
are here, and are not guessed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from bertsmith.checkpoint.state import RunState
from bertsmith.errors import UserError
from bertsmith.memory.devices import Device, said_bytes
from bertsmith.memory.fit import Way, auto_passes, smaller_passes, ways_to_fit
from bertsmith.memory.formula import (
    FIXED_BYTES,
    STILL_TO_COME_BYTES,
    MemoryPlan,
    fixed_bytes,
    held_bytes,
    held_later_bytes,
    plan_memory,
)
from bertsmith.memory.here import (
    WORTH_A_NAME_BYTES,
    Limit,
    Taken,
    cpu_room,
    gpu_processes,
    largest_processes,
    resident_bytes,
)
from bertsmith.memory.shapes import NumberFormat, RunShape
from bertsmith.model.encoder import Encoder
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.block_memory import has_kernels
from bertsmith.recipes.planning.device import Target, published
from bertsmith.recipes.planning.shape import Ground
from bertsmith.recipes.planning.text import in_a_line, rows_of, table_of
from bertsmith.train.micro_batch import is_out_of_memory
from bertsmith.train.precision import Compute

SURELY = 0.9
"""Of a planned peak, what a run needs for certain: the plan is right within 10 %."""

SMALL_TOKENS = 512
"""Smaller passes save hardly anything and take much longer: they are for want of memory alone, not
for a plan of it."""

FORMATS: dict[torch.dtype, NumberFormat] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The plan of a run on one device."""

    shape: RunShape
    """In whole packs."""

    room: Limit
    """What this device has besides what the run holds of it."""

    smallest_tokens: int
    """Of the smallest pass."""

    micro_batch_tokens: int | None = None
    """What the run begins with; None: whole packs."""

    @property
    def limit_bytes(self) -> int:
        """What the run may come to hold, as `MemoryPlan.needed_bytes` counts it."""
        to_come = STILL_TO_COME_BYTES[self.shape.device]
        return self.room.num_bytes + held_bytes(self.shape) + fixed_bytes(self.shape) - to_come

    def plan(self, micro_batch_tokens: int | None) -> MemoryPlan:
        """Of the run in passes of at most so many tokens; None: in whole packs."""
        return plan_memory(self.shape.in_passes(micro_batch_tokens))

    def planned_peak_bytes(self, micro_batch_tokens: int | None) -> int:
        """What `report.run_folder.peak_memory_bytes` will show.

        That is of tensors alone on a GPU; on a CPU what is resident of the whole process, with what
        its heap holds beyond tensors.
        """
        found = self.plan(micro_batch_tokens)
        return found.peak_bytes if self.shape.device == "cuda" else found.safe_bytes

    @property
    def later_bytes(self) -> int:
        """What the run holds only from its first save on."""
        return held_later_bytes(self.shape)

    @property
    def auto_tokens(self) -> int:
        """Most tokens of a pass that safely fits; if none does, of one to find out with."""
        smallest = max(self.smallest_tokens, SMALL_TOKENS)
        found = auto_passes(self.shape, self.limit_bytes, smallest=smallest)
        return smallest if found is None else found.tokens_per_pack

    @cached_property
    def smallest(self) -> RunShape:
        """The run in its smallest passes."""
        *_, last = smaller_passes(self.shape, smallest=self.smallest_tokens)
        return last

    @property
    def is_impossible(self) -> bool:
        """Whether the smallest passes are too large for certain."""
        surely = SURELY * plan_memory(self.smallest).peak_bytes
        return self.room.is_certain and surely > self.room.num_bytes + held_bytes(self.shape)

    def taken(self) -> Sequence[Taken]:
        """What others hold, where the run has less than it could use for that."""
        if self.shape.device == "cuda":
            return gpu_processes()
        is_of_this_process = self.room.is_certain and not self.room.is_of_cgroup
        return [] if is_of_this_process else largest_processes()

    def lines(self) -> list[str]:
        """For the start of the run's log."""
        found, whole = self.plan(self.micro_batch_tokens), self.plan(None)
        shape = self.shape.in_passes(self.micro_batch_tokens)
        said = (
            f"memory: about {said_bytes(found.needed_bytes)} planned, in {found.peak_phase}: "
            f"{in_a_line(found)}"
        )
        if shape.device == "cpu":
            said += f"; resident up to {said_bytes(found.safe_bytes)} with what the heap keeps"
        limit = f"memory: {said_bytes(self.limit_bytes)} can be used ({self.room.why}); "
        if shape.tokens_per_pack == self.shape.tokens_per_pack:
            return [said, f"{limit}passes of whole packs, {shape.tokens_per_pack:,} tokens"]
        lines = [
            said,
            f"{limit}passes of at most {shape.tokens_per_pack:,} tokens, which changes nothing but "
            f"rounding: whole packs of {self.shape.tokens_per_pack:,} would need "
            f"{said_bytes(whole.needed_bytes)}",
        ]
        if whole.safe_bytes > self.limit_bytes:
            lines += said_taken(self.taken())
        return lines

    def ways(self) -> list[Way]:
        """How the run in its smallest passes would need less."""
        needed = plan_memory(self.smallest).needed_bytes
        target = Target(device=self._device, why=self.room.why)
        half = target.half_format
        found = ways_to_fit(
            self.smallest,
            self.limit_bytes,
            step_tokens=self.smallest.tokens_per_pack * self.smallest.packs_per_step,
            speedup=None if half is None else target.speedup,
            half=half or "bf16",
        )
        return [way for way in found if way.plan.needed_bytes < needed]

    @property
    def _device(self) -> Device:
        if self.shape.device == "cpu":
            return Device(
                name="this CPU", kind="cpu", memory_bytes=self.limit_bytes, source="measured here"
            )
        name = torch.cuda.get_device_name()
        known = published(name) or Device(name=name, memory_bytes=0, source="torch")
        return replace(known, memory_bytes=self.limit_bytes)

    def breakdown(self) -> list[str]:
        """What the smallest passes need, and what would need less: for a run that has ended."""
        ways = self.ways()
        return [
            f"planned in passes of {self.smallest.tokens_per_pack:,} tokens, the smallest:",
            *rows_of(plan_memory(self.smallest)),
            f"{said_bytes(self.limit_bytes)} could be used ({self.room.why})",
            *said_taken(self.taken()),
            *(table_of(ways) if ways else []),
        ]

    def advice(self) -> str:
        """What to try, in a few words: the ways that fit, or else whatever needs less."""
        ways = self.ways()
        best = [way for way in ways if way.fits] or ways
        if not best:
            return "a device with more memory is what helps"
        said = (f"{way.options} needs {said_bytes(way.plan.needed_bytes)}" for way in best[:3])
        return ("" if best[0].fits else "no single setting is enough: ") + "; ".join(said)


def said_taken(taken: Sequence[Taken]) -> list[str]:
    """Who holds how much, a line each."""
    return [f"  taken by {one.who}: {said_bytes(one.num_bytes)}" for one in taken]


def ground_here(
    encoder: Encoder, compute: Compute, *, sharing: StrategyName, devices: int
) -> Ground:
    """What the run at hand computes on; asked before the model is shared out.

    Args:
        encoder: On its device.
        compute: Device and format.
        sharing: How devices share the run.
        devices: So many.
    """
    on_gpu = compute.device.type == "cuda"
    assert sharing != "auto", "one was chosen"
    return Ground(
        kind="cuda" if on_gpu else "cpu",
        number_format=FORMATS[compute.dtype],
        body="kernels" if has_kernels(encoder, compute) else "plain",
        threads=1 if on_gpu else torch.get_num_threads(),
        sharing=sharing,
        ranks=devices,
    )


def room_here(compute: Compute, world: World) -> Limit:
    """What this rank's device has besides what the rank holds of it."""
    if compute.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(compute.device)
        held = torch.cuda.memory_reserved(compute.device)
        others = total - free - held - FIXED_BYTES["cuda"]
        why = f"GPU of {said_bytes(total)}"
        if others >= WORTH_A_NAME_BYTES:
            why += f", others hold {said_bytes(others)}"
        unused = held - torch.cuda.memory_allocated(compute.device)
        return Limit(num_bytes=free + unused, why=why, is_certain=True)
    room = cpu_room()
    if world.local_size == 1 or (room.is_certain and not room.is_of_cgroup):
        return room
    share = f"a share of 1/{world.local_size} of {room.why}"
    return replace(room, num_bytes=room.num_bytes // world.local_size, why=share)


def measured(shape: RunShape) -> RunShape:
    """The run with what this process, whose model and moments are made, holds beside them.

    That grows with the data: texts, their tokens, labels.
    """
    resident = resident_bytes() if shape.device == "cpu" else None
    if resident is None:
        return shape
    # Moments of zeros may not be resident yet, so less than ever was measured is no measure.
    beside = resident - held_bytes(shape) + STILL_TO_COME_BYTES["cpu"]
    return replace(shape, fixed_bytes=max(beside, FIXED_BYTES["cpu"]))


def plan_run(
    shape_of: Callable[[], RunShape],
    *,
    micro_batch: int | Literal["auto"],
    smallest_tokens: int,
    compute: Compute,
    world: World,
    state: RunState,
) -> PlannedRun | None:
    """Plan a run whose model and moments are on its device; the same passes on every rank.

    A run that goes on keeps its passes, if they still fit, and so equals one that was never
    stopped. What `--micro_batch` says is kept whatever the plan is.

    Args:
        shape_of: Makes the run in numbers, in whole packs.
        micro_batch: As the config has it.
        smallest_tokens: Of a pass.
        compute: Device and format.
        world: The ranks.
        state: Where the run starts.

    Returns:
        None if it cannot be planned: no run fails for that.

    Raises:
        UserError: On every rank: some rank has surely not enough for the smallest passes.
    """
    found: PlannedRun | None = None
    tokens, is_impossible = None, False
    try:
        found = PlannedRun(
            shape=measured(shape_of()),
            room=room_here(compute, world),
            smallest_tokens=smallest_tokens,
        )
        if micro_batch == "auto":
            tokens = found.auto_tokens
            is_impossible = found.is_impossible
    except Exception:  # whatever it is, the run can do without a plan
        found = None
    chosen = _agreed(world, tokens, state.micro_batch_tokens)
    if world.sums([is_impossible])[0]:
        raise UserError(_impossible(found))
    if found is None:
        return None
    if chosen is not None and chosen >= found.shape.tokens_per_pack:
        chosen = None
    return replace(found, micro_batch_tokens=chosen)


@contextmanager
def lack_is_told(verb: str) -> Iterator[None]:
    """Within the block an allocation that fails outside of a step ends the run with a line.

    Such are those of the weights and moments themselves, for which there is no smaller way.

    Args:
        verb: For the advice.

    Raises:
        UserError: One failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lack = f"{error}".splitlines()[0] if f"{error}" else "an allocation was refused"
        raise UserError(
            f"out of memory outside of a step, where smaller passes do not help ({lack}); "
            f"`bertsmith plan {verb}` with the same options says what the run needs"
        ) from error


def _agreed(world: World, *tokens: int | None) -> int | None:
    """The smallest of all ranks' numbers; None if there is none."""
    none = 1 << 62
    smallest = world.smallest(min([none, *(n for n in tokens if n is not None)]))
    return None if smallest == none else smallest


def _impossible(found: PlannedRun | None) -> str:
    if found is None or not found.is_impossible:
        return "another rank has not enough memory for the smallest passes"
    least = plan_memory(found.smallest)
    return (
        f"{said_bytes(found.limit_bytes)} of memory can be used ({found.room.why}), and the least "
        f"that this run needs is {said_bytes(least.needed_bytes)}, in passes of "
        f"{found.smallest.tokens_per_pack:,} tokens; {found.advice()}"
    )
