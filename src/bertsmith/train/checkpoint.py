"""Checkpoints: complete Hugging Face folders with the training state beside, whole or absent.

A checkpoint is written into a temporary folder, each file is flushed to disk, a manifest with the
size and sha256 of every file comes last, and one rename makes it real. On resume the newest one
that matches its manifest is taken. No generator state is stored: everything random is a function
of the seed and the step. Nothing is pickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.durable import flush
from bertsmith.errors import UserError
from bertsmith.hf.weights import write_weights
from bertsmith.parallel.sharding import fill
from bertsmith.train.optim import AdamW

SCHEMA_VERSION = 1
MANIFEST, STATE, MOMENTS = "manifest.json", "training_state.json", "training_state.safetensors"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far a run has come: what a resumed run needs besides weights and moments."""

    step: int = 0
    """Steps done; the next step's data follows from it."""

    updates: int = 0
    """Updates applied: steps without an empty or overflowed one."""

    tokens: int = 0
    """Real tokens trained on."""

    train_seconds: float = 0.0
    """Time in training steps alone."""

    elapsed_seconds: float = 0.0
    """Time in the run, evaluation and saving included."""

    best_value: float | None = None
    """Best validation score so far, larger is better."""

    best_step: int | None = None
    """Step it was seen at."""

    evaluations_since_best: int = 0

    loss_scale: float | None = None
    """The fp16 scaler's scale; None for other formats."""

    loss_scale_streak: int = 0
    """Steps since the scaler last changed."""


def save_checkpoint(
    folder: Path,
    *,
    state: RunState,
    moments: Sequence[tuple[str, Tensor]],
    write_model: Callable[[Path], None],
    fingerprints: Mapping[str, str],
) -> Path:
    """Write `folder/step-N` and return it.

    Args:
        folder: The run's checkpoints folder.
        state: Goes into the JSON file.
        moments: The optimizer's, whole, by name: they go into a safetensors file.
        write_model: Writes the Hugging Face files into the folder it is given.
        fingerprints: What a resumed run must agree with, by name ("config", "data").

    Raises:
        UserError: The disk is full or cannot be written; no half checkpoint is left.
    """
    final = folder / f"step-{state.step}"
    fresh = folder / f".tmp-step-{state.step}-{os.getpid()}"
    try:
        for left in folder.glob(".tmp-step-*"):  # of processes that were killed while saving
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir(parents=True)
        write_model(fresh)
        write_weights(fresh / MOMENTS, moments)
        content = {
            "schema_version": SCHEMA_VERSION,
            "state": asdict(state),
            "fingerprints": dict(fingerprints),
        }
        (fresh / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files = {path.name: _facts(path) for path in sorted(fresh.iterdir())}
        manifest = {"schema_version": SCHEMA_VERSION, "files": files}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in fresh.iterdir():
            flush(path)
        flush(fresh)
        if final.exists():  # an older try at the same step
            shutil.rmtree(final)
        fresh.rename(final)
        flush(folder)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UserError(
            f"{final}: the checkpoint could not be written ({error.strerror or error}); "
            "earlier ones are untouched, free space and resume"
        ) from error
    return final


def keep_newest(folder: Path, *, step: int, keep_last: int, best_step: int | None) -> None:
    """Delete checkpoints but the newest `keep_last` up to `step`, the one just saved, and the best.

    Later ones are those that a resumed run passed over as damaged: they must not count, or good
    ones would be deleted for them; the run replaces them when it gets there.
    """
    steps = [s for s in _steps_in(folder) if s <= step]
    for old in steps[:-keep_last]:
        if old != best_step:
            shutil.rmtree(folder / f"step-{old}", ignore_errors=True)


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its manifest, or None.

    Args:
        folder: The run's checkpoints folder; need not exist.
        say: Told in a line about each newer one that is damaged and passed over.
    """
    for step in reversed(_steps_in(folder)):
        path = folder / f"step-{step}"
        fault = _fault_in(path)
        if fault is None:
            return path
        say(f"{path}: {fault}; going back to the checkpoint before it")
    return None


def read_state(path: Path) -> tuple[RunState, dict[str, str]]:
    """The run state and the fingerprints of a verified checkpoint."""
    content = json.loads((path / STATE).read_text(encoding="utf-8"))
    return RunState(**content["state"]), dict(content["fingerprints"])


def load_moments(path: Path, optimizer: AdamW, *, updates: int) -> None:
    """Put a checkpoint's moments into an optimizer over the same parameters.

    Raises:
        UserError: The checkpoint was made by a model with other parameters.
    """
    stored = load_file(path / MOMENTS)
    with torch.no_grad():
        for name, moment in optimizer.named_moments():
            if name not in stored or stored[name].shape != moment.shape:
                raise UserError(f"{path / MOMENTS}: does not fit this model: {name} is missing")
            fill(moment, stored[name])
    optimizer.updates = updates


def fingerprint_of(content: object) -> str:
    """sha256 of a value's canonical JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _fault_in(path: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema_version"] != SCHEMA_VERSION:
            return f"written by another version (schema {manifest['schema_version']})"
        for name, facts in manifest["files"].items():
            if _facts(path / name) != facts:
                return f"{name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def _facts(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; other folders are not ours and do not count."""
    if not folder.is_dir():
        return []
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*") if p.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())
