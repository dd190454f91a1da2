"""`bertsmith finetune --search.trials N`: try settings, and keep the best.

Optuna (the extra `search`) draws them with its tree-structured Parzen estimator (Bergstra et al.
2011). Each trial is a run of its own in `trial-NNN/`. Optuna's journal in the folder holds what
was drawn and found, so that an interrupted search goes on and can be given more trials. A trial's
draws follow from (seed, trial number) and what earlier trials found: interrupted or not, a search
tries the same settings.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bertsmith.data.checkup.grammar import number_of
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.metrics import LOWER_IS_BETTER
from bertsmith.recipes.config import FinetuneConfig, SearchConfig
from bertsmith.recipes.several_runs import (
    InterruptedPartError,
    PartRun,
    best_of,
    carry_out,
    drop_weights,
    has_trained,
    opened,
    part_of,
    promote,
    read_part,
    say_interrupted,
)
from bertsmith.report.console import table_console
from bertsmith.report.progress import Speaker
from bertsmith.report.run_folder import write_config, write_text

RESULT_FILE, JOURNAL_FILE = "search.json", "search.journal"

SHOWN = 10
"""Trials in the table."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One trial that is over."""

    number: int
    settings: dict[str, float]
    """What was drawn, by key."""

    metrics: dict[str, float] | None
    """Scores of its best weights; None where its numbers went wrong."""


@dataclass(frozen=True, kw_only=True)
class SearchSummary:
    """What a search gave; `search.json` holds the same."""

    status: str
    """completed or interrupted."""

    monitor: str | None
    """The metric that picked the best; None before a trial is done."""

    best_trial: int | None
    trials: list[Tried]


def main(config: FinetuneConfig) -> int:
    """Search; print a table and the folder of the best model."""
    summary = search(config)
    if summary.status == "interrupted":
        return EXIT_INTERRUPTED
    print_table(summary, table_console())
    print(Path(config.output) / "model")
    return 0


def search(config: FinetuneConfig) -> SearchSummary:
    """Fine-tune with `config.search.trials` settings; `run.yaml` then repeats the best run.

    Raises:
        UserError: As `finetune`; Optuna is not installed; the folder holds a search of other
            settings or data; or no trial came to its end.
    """
    optuna = import_optuna()
    folder = Path(config.output)
    with opened(config) as speaker:
        study = _study(optuna, folder)
        tried: list[Tried] = []
        for number in range(config.search.trials):
            settings = _drawn(optuna, study, config, number)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in settings.items())
            speaker.say(f"trial {number} of {config.search.trials}: {shown}")
            try:
                part = _carry_out(config, settings, number, speaker)
            except InterruptedPartError:
                say_interrupted(speaker, folder)
                return _summed_up(tried, folder, status="interrupted")
            if study.trials[number].state == optuna.trial.TrialState.RUNNING:
                if part is None:
                    study.tell(number, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(number, part.rank)
            metrics = None if part is None else dict(part.metrics)
            tried.append(Tried(number=number, settings=settings, metrics=metrics))
            if part is not None and config.keep_models == "best":
                drop_weights(folder, _parts(tried, folder))
        summary = _summed_up(tried, folder, status="completed")
        if summary.best_trial is None:
            raise UserError(
                f"{folder}: no trial came to its end; lower --search.learning_rate, or see "
                "log.txt of a trial"
            )
        promote(folder / _name(summary.best_trial), folder, keeps=config.keep_models == "all")
        text = json.dumps(asdict(summary), indent=2, ensure_ascii=False)
        write_text(folder / RESULT_FILE, text + "\n")
        best = tried[summary.best_trial].settings
        write_config(folder, replace(_with(config, best), search=SearchConfig()))
    return summary


def import_optuna() -> Any:
    """The library that draws settings, told to be quiet.

    Raises:
        UserError: It is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "--search.trials: needs Optuna; install it with: pip install 'bertsmith[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(optuna: Any, folder: Path) -> Any:
    """The search as its journal has it, or a new one."""
    journal = optuna.storages.journal
    storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL_FILE)))
    return optuna.create_study(
        study_name="search", storage=storage, direction="maximize", load_if_exists=True
    )


def _drawn(optuna: Any, study: Any, config: FinetuneConfig, number: int) -> dict[str, float]:
    """Settings of a trial, drawn once: what the journal has is not drawn again."""
    space = _space(optuna, config)
    if number < len(study.trials):
        # A process that was killed while it drew has left some of them; what it lacks is drawn.
        trial = optuna.trial.Trial(study, study.trials[number]._trial_id)
        if set(trial.params) == set(space):
            return dict(trial.params)
    study.sampler = optuna.samplers.TPESampler(
        seed=(config.seed * 1_000_003 + number) % 2**32, n_startup_trials=5
    )
    if number == len(study.trials):
        return dict(study.ask(fixed_distributions=space).params)
    for key, distribution in space.items():
        trial._suggest(key, distribution)
    return dict(trial.params)


def _space(optuna: Any, config: FinetuneConfig) -> dict[str, Any]:
    """What is drawn from, by key of the config."""
    asked, kinds = config.search, optuna.distributions
    space: dict[str, Any] = {}
    if asked.learning_rate:
        ends = asked.learning_rate
        space["optim.learning_rate"] = kinds.FloatDistribution(ends[0], ends[-1], log=True)
    if asked.layer_decay and config.optim.rates is None:  # rates by layer leave nothing to decay
        ends = asked.layer_decay
        space["optim.layer_decay"] = kinds.FloatDistribution(ends[0], ends[-1])
    if asked.epochs and config.steps is None:
        space["epochs"] = kinds.CategoricalDistribution(tuple(map(float, asked.epochs)))
    if asked.examples_per_step:
        space["examples_per_step"] = kinds.CategoricalDistribution(tuple(asked.examples_per_step))
    if not space:
        raise UserError("--search: every range is empty, so there is nothing to try")
    return space


def _with(config: FinetuneConfig, settings: Mapping[str, float]) -> FinetuneConfig:
    """The config with what was drawn."""
    optim: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in settings.items():
        group, _, name = key.rpartition(".")
        (optim if group else own)[name] = value
    return replace(config, optim=replace(config.optim, **optim), **own)


def _carry_out(
    config: FinetuneConfig, settings: Mapping[str, float], number: int, speaker: Speaker
) -> PartRun | None:
    """Run a trial to its end; None if its numbers went wrong."""
    part = _with(part_of(config, _name(number)), settings)
    if has_trained(Path(part.output)):
        return None
    try:
        return carry_out(part)
    except UserError as error:
        if not has_trained(Path(part.output)):
            raise  # a mistake in what was asked, which the next trial would meet too
        speaker.say(f"trial {number} failed: {error}")
        return None


def _name(number: int) -> str:
    return f"trial-{number:03d}"


def _parts(tried: list[Tried], folder: Path) -> list[PartRun]:
    """The trials that came to their end."""
    found = [read_part(folder / _name(one.number)) for one in tried if one.metrics is not None]
    return [part for part in found if part is not None]


def _summed_up(tried: list[Tried], folder: Path, *, status: str) -> SearchSummary:
    parts = _parts(tried, folder)
    best = best_of(parts) if parts else None
    return SearchSummary(
        status=status,
        monitor=None if best is None else best.monitor,
        best_trial=None if best is None else int(best.name.removeprefix("trial-")),
        trials=tried,
    )


def print_table(summary: SearchSummary, console: Console) -> None:
    """The best trials, a line each, and how many failed."""
    assert summary.monitor is not None, "a trial is done"
    monitor = summary.monitor
    done = [(one, one.metrics) for one in summary.trials if one.metrics is not None]
    # The best stands first even where scores tie, which the loss then decides.
    sign = -1.0 if monitor in LOWER_IS_BETTER else 1.0
    done.sort(key=lambda of: (of[0].number != summary.best_trial, -sign * of[1][monitor]))
    grid = Table(title=f"{len(summary.trials)} trials, the best by {monitor} first")
    for heading in ("trial", monitor, *summary.trials[0].settings):
        grid.add_column(heading, justify="right")
    for one, metrics in done[:SHOWN]:
        values = (f"{value:.4g}" for value in one.settings.values())
        grid.add_row(str(one.number), f"{metrics[monitor]:.4f}", *values)
    console.print(grid)
    if failed := len(summary.trials) - len(done):
        console.print(f"{number_of(failed, 'trial')} failed: numbers went wrong")
