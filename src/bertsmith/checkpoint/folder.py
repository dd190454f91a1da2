"""A run's checkpoints: complete Hugging Face folders with the training state beside.

    checkpoints/step-200/config.json, model.safetensors, tokenizer.json   for `from_pretrained`
                         training_state.json, training_state.safetensors  for `--resume`
                         manifest.json
    checkpoints/damaged-step-300/                                         set aside, never deleted

No generator state is stored: everything random is a function of the seed and the step. Moments are
stored whole, so that a run may go on with other ranks or under another strategy.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.checkpoint.commit import REPLACED, TEMPORARY, commit, recover_replaced
from bertsmith.checkpoint.manifest import (
    NOT_THERE,
    SCHEMA_VERSION,
    DamagedError,
    UnreadableError,
    read_manifest,
    verify,
)
from bertsmith.checkpoint.state import RunState
from bertsmith.durable import rename
from bertsmith.errors import UserError
from bertsmith.hf.weights import write_weights
from bertsmith.parallel.kept_rows import TrainedRows
from bertsmith.parallel.sharding import fill
from bertsmith.say import Say

STATE, MOMENTS = "training_state.json", "training_state.safetensors"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which run a checkpoint belongs to: what a continuation has to agree with."""

    verb: str
    config: Mapping[str, Any]
    """Every setting by its dotted key, as plain values."""

    data: Mapping[str, str]
    """Fingerprints of what is learned from, by name."""

    versions: Mapping[str, str]
    """What the checkpoint was made with; for information."""


def write_checkpoint(
    folder: Path,
    *,
    state: RunState,
    identity: Identity,
    moments: Sequence[tuple[str, Tensor]],
    write_model: Callable[[Path], None],
    model_bytes: int,
) -> Path:
    """Write `folder/step-N` and return it.

    Args:
        folder: The run's checkpoints folder.
        state: Where the run is; N is its step.
        identity: Of the run.
        moments: The optimizer's, whole, by name.
        write_model: Writes the Hugging Face files into the folder it is given.
        model_bytes: About what it writes.

    Raises:
        NotWrittenError: The disk is full, forbids it, or fails.
    """

    def write(fresh: Path) -> None:
        write_model(fresh)
        write_weights(fresh / MOMENTS, moments)
        content = {
            "schema_version": SCHEMA_VERSION,
            "state": state.to_json(),
            "verb": identity.verb,
            "config": dict(identity.config),
            "data": dict(identity.data),
            "versions": dict(identity.versions),
        }
        (fresh / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # safetensors writes for the owner alone; a run is for whoever may read its folder.
        shutil.copymode(fresh / STATE, fresh / MOMENTS)

    return commit(
        folder,
        step=state.step,
        write=write,
        about={
            "value": state.value,
            "config_sha256": _sha256(identity.config),
            "data": dict(identity.data),
            "versions": dict(identity.versions),
        },
        needed_bytes=model_bytes + sum(t.numel() * 4 for _, t in moments),
    )


def newest_checkpoint(folder: Path, say: Say) -> Path | None:
    """The newest checkpoint that is as it was written, or None.

    A newer one that is not is set aside under another name, so that nothing counts it any more.

    Args:
        folder: The run's checkpoints folder; need not exist.
        say: Told in a line about each that is set aside.

    Raises:
        OtherSchemaError: The newest one is of a version that this one cannot go on from.
        UnreadableError: Whether the newest one is whole cannot be seen; nothing is set aside then.
    """
    if steps_in(folder, moved_aside=True):
        try:
            recover_replaced(folder)
        except OSError as error:
            raise UnreadableError(folder, error) from error
    for step in reversed(steps_in(folder)):
        path = folder / f"step-{step}"
        try:
            verify(path)
        except DamagedError as error:
            say(f"{path}: {error}; {_set_aside(path)}, looking for the one before")
        else:
            return path
    return None


def steps_in(folder: Path, *, moved_aside: bool = False) -> list[int]:
    """Steps that have a checkpoint, ascending; other folders are not ours and do not count.

    Args:
        folder: The run's checkpoints folder; need not exist.
        moved_aside: Steps whose checkpoint a killed process was replacing, instead.

    Raises:
        UnreadableError: It exists, and cannot be read.
    """
    prefix = REPLACED if moved_aside else "step-"
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except NOT_THERE:
        return []
    except OSError as error:
        raise UnreadableError(folder, error) from error
    numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(number) for number in numbers if number.isdecimal())


def retain(folder: Path, *, step: int, keep_last: int, keep_best: int) -> None:
    """Delete checkpoints but the newest and the best, by what their manifests say.

    Args:
        folder: The run's checkpoints folder.
        step: Of the one just written, which stays whatever else; later ones do not count.
        keep_last: So many of the newest stay.
        keep_best: And so many of those with the best score.
    """
    try:
        steps = [s for s in steps_in(folder) if s <= step]
    except UnreadableError:
        return
    scores: dict[int, float] = {}
    kept = set[int]()
    for one in steps:
        try:
            value = read_manifest(folder / f"step-{one}")["value"]
        except UnreadableError:  # it may be the best one
            kept.add(one)
            continue
        except (DamagedError, UserError, KeyError):
            continue
        if value is not None:
            scores[one] = value
    kept |= set(sorted(scores, key=lambda one: (-scores[one], one))[:keep_best])
    for old in steps[:-keep_last]:
        if old in kept:
            continue
        gone = folder / f"{TEMPORARY}{old}-deleted"  # half a folder must not look like a whole one
        with suppress(OSError):
            rename(folder / f"step-{old}", gone)
            shutil.rmtree(gone, ignore_errors=True)


def read_state(path: Path) -> tuple[RunState, Identity]:
    """Where the run of a verified checkpoint was, and which run it is.

    Raises:
        UnreadableError: The disk fails meanwhile.
    """
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableError(path / STATE, error) from error
    identity = Identity(
        verb=content["verb"],
        config=content["config"],
        data=content["data"],
        versions=content["versions"],
    )
    return RunState.from_json(content["state"]), identity


@torch.no_grad()
def load_moments(
    path: Path, moments: Iterable[tuple[str, Tensor]], *, rows: TrainedRows | None = None
) -> None:
    """Put a checkpoint's moments into those of an optimizer over the same parameters.

    Args:
        path: The checkpoint, verified.
        moments: By name.
        rows: Those of the token table that the optimizer trains; None: all.

    Raises:
        UserError: The checkpoint was made by a model with other parameters, or cannot be read.
    """
    try:
        stored = load_file(path / MOMENTS)
    except OSError as error:
        raise UnreadableError(path / MOMENTS, error) from error
    for name, moment in moments:
        if name not in stored:
            raise UserError(f"{path / MOMENTS}: does not fit this model: {name} is missing")
        values = stored[name] if rows is None else rows.fitted(name, stored[name], moment)
        if values.shape != moment.shape:
            raise UserError(
                f"{path / MOMENTS}: does not fit this model: {name} has the shape "
                f"{list(values.shape)}, and is to have {list(moment.shape)}"
            )
        fill(moment, values)


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint; in a few words, what became of it."""
    aside = path.with_name(f"damaged-{path.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    try:
        rename(path, aside)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror or error})"
    return f"set aside as {aside.name}"
