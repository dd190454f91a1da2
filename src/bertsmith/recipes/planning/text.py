"""Bytes, plans and times as a person reads them."""

from collections.abc import Iterator, Sequence

from bertsmith.memory.devices import MIB, said_bytes
from bertsmith.memory.fit import Way
from bertsmith.memory.formula import MemoryPlan
from bertsmith.recipes.planning.times import Times


def parts_of(found: MemoryPlan) -> dict[str, int]:
    """What a plan's peak and its need are made of, in bytes."""
    return {
        "weights": found.weights_bytes,
        "gradients": found.gradients_bytes,
        "optimizer moments": found.moments_bytes,
        "activations": found.activations_bytes,
        "logits": found.logits_bytes,
        "workspace": found.workspace_bytes,
        "snapshot for saving": found.snapshot_bytes,
        "beside tensors": found.fixed_bytes,
    }


def rows_of(found: MemoryPlan) -> list[str]:
    """A plan as a table, without the parts that there are none of."""
    parts = {name: size for name, size in parts_of(found).items() if size}
    beside = parts.pop("beside tensors", 0)
    sums = {
        "peak of tensors": found.peak_bytes,
        "beside tensors": beside,
        "needed": found.needed_bytes,
    }
    return [f"  {name:<20}{said_bytes(size):>10}" for name, size in (parts | sums).items()]


def in_a_line(found: MemoryPlan) -> str:
    """A plan's parts, the largest first, those of less than a MiB left out."""
    parts = sorted(parts_of(found).items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {said_bytes(size)}" for name, size in parts if size >= MIB)


def said_seconds(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"


def said_times(times: Times | None) -> list[str]:
    """Time, energy and cost."""
    if times is None:
        return ["time: the device's rate is not known; give --flop_per_second"]
    lines = [
        f"time: {times.step_seconds:.3g} s a step of {times.step_tokens:,} tokens at "
        f"{times.flop_per_second / 1e12:.3g} TFLOP/s ({times.rate_source})"
    ]
    if times.run_seconds is None:
        return [*lines, "  of the whole run: the budget is not known (steps, tokens or examples)"]
    said = f"  of the whole run: {times.steps:,.0f} steps, {said_seconds(times.run_seconds)}"
    if times.kilowatt_hours is not None:
        said += f", {times.kilowatt_hours:,.2f} kWh at full load"
    if times.cost is not None:
        said += f", cost {times.cost:,.2f}"
    return [*lines, said]


def table_of(ways: Sequence[Way]) -> Iterator[str]:
    """The ways to fit, a line each."""
    yield f"{'ways to fit':<30}{'needs':>10}  {'fits':<5}{'largest pass':>13}{'time':>7}"
    for way in ways:
        largest = way.largest_tokens_per_pack
        yield (
            f"  {way.what:<28}{said_bytes(way.plan.needed_bytes):>10}  "
            f"{'yes' if way.fits else 'no':<5}{'none' if largest is None else f'{largest:,}':>13}"
            f"{f'x{way.time_factor:.2f}':>7}  {way.options}" + (f"; {way.note}" if way.note else "")
        )
