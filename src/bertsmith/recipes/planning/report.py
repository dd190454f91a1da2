"""All that `bertsmith plan` has found, and how it is written."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bertsmith.memory.devices import said_bytes
from bertsmith.memory.fit import Way
from bertsmith.memory.formula import MemoryPlan
from bertsmith.memory.shapes import RunShape, parameters_of
from bertsmith.recipes.planning.device import Target
from bertsmith.recipes.planning.text import rows_of, said_times, table_of
from bertsmith.recipes.planning.times import Times


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is said."""

    shape: RunShape
    """In the passes that `--micro_batch` asks for; of auto in whole packs."""

    target: Target
    plan: MemoryPlan
    fits: bool
    micro_batch_tokens: int | None
    """What `--micro_batch auto` would take; None: no pass is small enough."""

    micro_batch_plan: MemoryPlan | None
    """Of the run in passes of that size."""

    largest_tokens_per_pack: int | None
    times: Times | None
    ways: Sequence[Way]
    least: MemoryPlan
    """The least that one device can do with."""


def as_json(report: Report) -> str:
    """One object."""
    shape, target, smaller = report.shape, report.target, report.micro_batch_plan
    counts = parameters_of(shape)
    return json.dumps(
        {
            "device": target.device.name,
            "limit_bytes": target.device.memory_bytes,
            "limit_from": target.why,
            "taken": [asdict(taken) for taken in target.taken],
            "parameters": counts.trained + counts.aside + counts.frozen,
            "number_format": shape.number_format,
            "tokens_per_pack": shape.tokens_per_pack,
            "plan": as_numbers(report.plan),
            "fits": report.fits,
            "micro_batch_tokens": report.micro_batch_tokens,
            "micro_batch_needed_bytes": None if smaller is None else smaller.needed_bytes,
            "largest_tokens_per_pack": report.largest_tokens_per_pack,
            "least_needed_bytes": report.least.needed_bytes,
            "times": None if report.times is None else asdict(report.times),
            "ways": [
                {
                    "what": way.what,
                    "options": way.options,
                    "needed_bytes": way.plan.needed_bytes,
                    "fits": way.fits,
                    "largest_tokens_per_pack": way.largest_tokens_per_pack,
                    "time_factor": way.time_factor,
                    "note": way.note,
                }
                for way in report.ways
            ],
        },
        indent=2,
    )


def as_numbers(found: MemoryPlan) -> dict[str, Any]:
    """A plan for a file or a line of JSON."""
    return {
        **{key: value for key, value in asdict(found).items() if key != "phase_peaks_bytes"},
        "phase_peaks_bytes": dict(found.phase_peaks_bytes),
        "needed_bytes": found.needed_bytes,
    }


def as_text(report: Report) -> str:
    """For a person."""
    shape, target, found = report.shape, report.target, report.plan
    limit = target.device.memory_bytes
    counts = parameters_of(shape)
    frozen = f"{counts.frozen:,} frozen ones, " if counts.frozen else ""
    lines = [
        f"model: {counts.trained:,} trained parameters, {frozen}{shape.number_format}, passes of "
        f"{shape.tokens_per_pack:,} tokens, sequences of up to {shape.longest}",
        f"device: {target.device.name}, {said_bytes(limit)} ({target.why})",
        *(f"  taken by {taken.who}: {said_bytes(taken.num_bytes)}" for taken in target.taken),
        "",
        *rows_of(found),
        "",
        f"the peak is in: {found.peak_phase}",
        _said_fit(report),
        "",
        *said_times(report.times),
        *_said_lengths(report.shape),
    ]
    if report.ways:
        lines += ["", *table_of(report.ways)]
    return "\n".join(lines)


def _said_fit(report: Report) -> str:
    if report.fits:
        return f"it fits; passes may have up to {report.largest_tokens_per_pack:,} tokens"
    smaller = report.micro_batch_plan
    if smaller is None:
        return "it does not fit, not in passes of any size"
    return (
        f"it does not fit in one pass; --micro_batch auto takes {report.micro_batch_tokens:,} "
        f"tokens at a time and needs {said_bytes(smaller.needed_bytes)}, for the same result"
    )


def _said_lengths(shape: RunShape) -> list[str]:
    """What a plan of fine-tuning takes texts for, which it does not read."""
    if shape.task == "masked_lm":
        return []
    return [
        f"  as if every text had {shape.longest:,} tokens; give --max_sequence_tokens if yours are "
        "shorter"
    ]
