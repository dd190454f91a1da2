"""`bertsmith finetune --seeds N`: the same fine-tuning with N seeds, its mean and its spread.

One run's score says little: on small tables seeds alone move accuracy by points. Each seed is a
run of its own in `seed-K/`; `seeds.json` has all scores, `model/` the best weights.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bertsmith.errors import EXIT_INTERRUPTED
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.several_runs import (
    InterruptedPartError,
    PartRun,
    best_of,
    carry_out,
    drop_weights,
    opened,
    part_of,
    promote,
    say_interrupted,
)
from bertsmith.report.console import table_console
from bertsmith.report.run_folder import write_text

RESULT_FILE = "seeds.json"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A metric over several seeds."""

    mean: float
    standard_deviation: float
    """Of the sample: divided by one less than the number of seeds."""

    standard_error: float
    """Of the mean."""

    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class SeedsSummary:
    """What several seeds gave; `seeds.json` holds the same."""

    status: str
    """completed or interrupted."""

    monitor: str | None
    """The metric that picked the best; None before the first seed is done."""

    best_seed: int | None
    seeds: dict[int, dict[str, float]]
    """Scores by seed."""

    metrics: dict[str, Spread]
    """By metric; of those that every seed has."""


def main(config: FinetuneConfig) -> int:
    """Fine-tune with each seed; print a table and the folder of the best model."""
    summary = finetune_seeds(config)
    if summary.status == "interrupted":
        return EXIT_INTERRUPTED
    print_table(summary, table_console())
    print(Path(config.output) / "model")
    return 0


def finetune_seeds(config: FinetuneConfig) -> SeedsSummary:
    """Fine-tune with the seeds `config.seed` and after, `config.seeds` of them.

    Raises:
        UserError: As `finetune`; or the folder holds seeds of other settings or data.
    """
    folder = Path(config.output)
    wanted = range(config.seed, config.seed + config.seeds)
    done: dict[int, PartRun] = {}
    with opened(config) as speaker:
        for seed in wanted:
            speaker.say(f"seed {seed}, of {wanted[0]} to {wanted[-1]}")
            part = replace(part_of(config, f"seed-{seed}"), seed=seed)
            try:
                done[seed] = carry_out(part)
            except InterruptedPartError:
                say_interrupted(speaker, folder)
                return _summed_up(done, status="interrupted")
            if config.keep_models == "best":
                drop_weights(folder, list(done.values()))
        summary = _summed_up(done, status="completed")
        promote(folder / f"seed-{summary.best_seed}", folder, keeps=config.keep_models == "all")
        text = json.dumps(asdict(summary), indent=2, ensure_ascii=False)
        write_text(folder / RESULT_FILE, text + "\n")
    return summary


def _summed_up(done: dict[int, PartRun], *, status: str) -> SeedsSummary:
    parts = list(done.values())
    best = best_of(parts) if parts else None
    names = parts[0].metrics if parts else ()
    shared = [name for name in names if all(name in part.metrics for part in parts)]
    return SeedsSummary(
        status=status,
        monitor=None if best is None else best.monitor,
        best_seed=next((seed for seed, part in done.items() if part is best), None),
        seeds={seed: dict(part.metrics) for seed, part in done.items()},
        metrics={name: spread_of([part.metrics[name] for part in parts]) for name in shared},
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and spread of one metric's values, at least one."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(
        mean=statistics.fmean(values),
        standard_deviation=deviation,
        standard_error=deviation / math.sqrt(len(values)),
        least=min(values),
        most=max(values),
    )


def print_table(summary: SeedsSummary, console: Console) -> None:
    """A line a metric."""
    title = f"{len(summary.seeds)} seeds; the best by {summary.monitor} is {summary.best_seed}"
    grid = Table(title=title)
    grid.add_column("metric")
    for heading in ("mean", "deviation", "error of mean", "least", "most"):
        grid.add_column(heading, justify="right")
    for name, spread in summary.metrics.items():
        grid.add_row(name, *(f"{value:.4f}" for value in asdict(spread).values()))
    console.print(grid)
