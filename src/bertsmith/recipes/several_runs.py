"""What `--seeds` and `--search.trials` share: fine-tunings in folders of their own under one.

A part that is done is read, never run again; one that was interrupted goes on. Of the parts the
best so far keeps its weights, and at the end they are `model/` of the whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bertsmith.durable import rename
from bertsmith.errors import UserError
from bertsmith.parallel.place import place_from, program_of
from bertsmith.recipes.config import FinetuneConfig, SearchConfig
from bertsmith.recipes.finetune import check_output, finetune
from bertsmith.recipes.finetune_run import rank_of
from bertsmith.recipes.resume import FREE_GROUPS, FREE_KEYS, flat
from bertsmith.report.progress import Speaker
from bertsmith.report.run_folder import (
    CONFIG_FILE,
    SUMMARY_FILE,
    open_run_folder,
    write_config,
    write_text,
)
from bertsmith.report.run_lock import hold_run_lock
from bertsmith.report.run_status import resume_command

SETTINGS_FILE = "settings.json"
"""What all parts have alike; a continuation must agree with it."""

WEIGHTS = ("model", "adapter")
"""Folders of a run that hold weights of use."""

OWN_KEYS = ("seeds", "keep_models", "search.trials")
"""Keys of the whole that may change: parts are added, or more weights kept."""


@dataclass(frozen=True, kw_only=True)
class PartRun:
    """One fine-tuning that is done."""

    name: str
    """Of its folder."""

    metrics: Mapping[str, float]
    """Scores of its best weights on the examples it was judged by."""

    monitor: str
    """The metric that it was judged by."""

    @property
    def rank(self) -> float:
        """How good it is; larger is better."""
        return rank_of(self.metrics, self.monitor)


class InterruptedPartError(Exception):
    """A part was stopped by a signal; all of it is saved."""


@contextmanager
def opened(config: FinetuneConfig) -> Iterator[Speaker]:
    """Within the block the folder of the whole is this process's, and has its config.

    Raises:
        UserError: It cannot be written, holds another run, or one with other settings or data; or
            the parts would need several processes.
    """
    check_one_process()
    if config.resume_override:
        raise UserError("--resume.override: is for one run, and not for --seeds or --search.trials")
    check_output(config)
    settings = settings_of(config)
    with hold_run_lock(Path(config.output), Speaker().say):
        folder = Path(config.output)
        if config.resume:
            check_settings(folder, settings)
        open_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
        write_config(folder, config)
        write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        yield Speaker(folder)


def check_one_process() -> None:
    """Refuse to be one of several processes.

    Raises:
        UserError: A launcher has started more than this one.
    """
    place = place_from(os.environ)
    if place is not None and place.size > 1:
        raise UserError(
            "--seeds and --search.trials train in one process, and torchrun or srun has started "
            f"{place.size}; start one"
        )


def settings_of(config: FinetuneConfig) -> dict[str, Any]:
    """What the results follow from: settings by key, and what the tables hold."""
    settings = {
        key: value
        for key, value in flat(asdict(config)).items()
        if key not in (*FREE_KEYS, *OWN_KEYS) and key.split(".", 1)[0] not in FREE_GROUPS
    }
    for name in ("data", "eval"):
        path = getattr(config, name)
        if path is not None and Path(path).is_file():
            settings[f"sha256 of {name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def check_settings(folder: Path, now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings.

    Raises:
        UserError: They differ from those that the folder's parts were made with.
    """
    file = folder / SETTINGS_FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not (folder / CONFIG_FILE).exists():
            return
        raise UserError(
            f"{folder}: cannot resume: holds no run of --seeds or --search.trials"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable ({error}); train into a new folder") from error
    for key, value in now.items():
        if before.get(key, value) != value:
            raise UserError(
                f"{folder}: cannot resume: {key} was {before[key]}, is {value}; repeat it as it "
                "was, or train into a new folder"
            )


def part_of(config: FinetuneConfig, name: str) -> FinetuneConfig:
    """The config of a single run in a folder below."""
    return replace(
        config,
        output=str(Path(config.output) / name),
        seeds=1,
        search=SearchConfig(),
        keep_models="best",
        parallel=replace(config.parallel, devices=1),
        overwrite=False,
        resume=(Path(config.output) / name).exists(),
    )


def carry_out(config: FinetuneConfig) -> PartRun:
    """Run a part to its end, unless it is done.

    Raises:
        UserError: As `finetune`.
        InterruptedPartError: A signal stopped it.
    """
    folder = Path(config.output)
    done = read_part(folder)
    if done is not None:
        return done
    if finetune(config).status != "completed":
        raise InterruptedPartError
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    done = read_part(folder)
    assert done is not None, "it has just been completed"
    return done


def read_part(folder: Path) -> PartRun | None:
    """A part that is done; None if it is not."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        made_with = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{folder}: not readable ({error}); delete it to run it again") from error
    if summary["status"] != "completed":
        return None
    metrics = {name: value for name, value in summary["metrics"].items() if value is not None}
    return PartRun(name=folder.name, metrics=metrics, monitor=made_with["monitor"])


def has_trained(folder: Path) -> bool:
    """Whether a part that failed got as far as its steps."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary["status"] == "failed")


def best_of(parts: Sequence[PartRun]) -> PartRun:
    """The best; of equals the first."""
    return max(parts, key=lambda part: part.rank)


def drop_weights(parts_folder: Path, parts: Sequence[PartRun]) -> None:
    """Delete the weights of all but the best."""
    best = best_of(parts)
    for part in parts:
        if part is not best:
            for name in WEIGHTS:
                shutil.rmtree(parts_folder / part.name / name, ignore_errors=True)


def promote(best: Path, output: Path, *, keeps: bool) -> None:
    """Make the best part's weights those of the whole.

    Args:
        best: The part's folder; without weights they have been promoted before.
        output: Folder of the whole.
        keeps: Whether the part keeps a copy.
    """
    for name in WEIGHTS:
        source, target = best / name, output / name
        if not source.is_dir():
            continue
        fresh = output / f".{name}.tmp-{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        if keeps:
            shutil.copytree(source, fresh)
        shutil.rmtree(target, ignore_errors=True)
        rename(fresh if keeps else source, target)


def say_interrupted(speaker: Speaker, folder: Path) -> None:
    """Say how to go on."""
    command = resume_command("finetune", folder, program=program_of(os.environ))
    speaker.say(f"interrupted; what is done stays. Go on with: {command}")
