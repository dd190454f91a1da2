"""The run folder: who may write it, and the files that say what the run was and how it ended."""

import json
import math
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from bertsmith import __version__
from bertsmith.durable import write_whole
from bertsmith.errors import UserError
from bertsmith.report.run_lock import is_lock_file

CONFIG_FILE, SUMMARY_FILE = "run.yaml", "summary.json"

LEFT = re.compile(r"\.probe-\d+|\..+\.tmp-\d+")
"""Names of files on their way to another name: `durable.write_whole`, and the probe below."""


def check_run_folder(path: str, *, resume: bool | None, overwrite: bool) -> None:
    """Refuse a folder that may not be written, and change nothing.

    Args:
        path: The run folder.
        resume: Whether its run is to go on; None for a verb that cannot.
        overwrite: Whether its run may be replaced.

    Raises:
        UserError: It holds another run and neither `resume` nor `overwrite` is given, or holds
            files that are no run of ours.
    """
    folder = Path(path)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--output {path}: is a file; name a folder")
        if not folder.is_dir() or not _content(folder):
            return
    except OSError as error:
        raise UserError(f"--output {path}: cannot be read ({error.strerror or error})") from error
    if not (folder / CONFIG_FILE).exists():
        raise UserError(f"--output {path}: holds files that are no run; name a new folder")
    if not resume and not overwrite:
        how = "--overwrite to replace it"
        if resume is not None:
            how = f"--resume to go on with it or {how}"
        raise UserError(f"--output {path}: holds another run; name a new folder, or give {how}")


def check_inputs_stay(path: str, inputs: Mapping[str, str | None]) -> None:
    """Refuse to replace a run that holds what is to be read.

    Args:
        path: The run folder, which would be emptied.
        inputs: Paths by the option that names them; what is no path here is passed over.

    Raises:
        UserError: An input lies in the folder.
    """
    folder = Path(path).resolve()
    for option, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve().is_relative_to(folder):
            raise UserError(f"--output {path}: holds --{option} {name}; name a new folder")


def open_run_folder(path: str, *, resume: bool | None, overwrite: bool) -> Path:
    """Make the folder, or empty it if it holds a run that is to be replaced.

    Its lock is held: nobody else writes there, so that half a file is what a killed process left.

    A lock (`run_lock`) that was taken on it before stays in place.

    Raises:
        UserError: As `check_run_folder`; or it cannot be written.
    """
    check_run_folder(path, resume=resume, overwrite=overwrite)
    folder = Path(path)
    try:
        if folder.is_dir() and overwrite and not resume:
            # The config last: what is left of a run is a run, if this is killed on the way.
            for entry in sorted(_content(folder), key=lambda entry: entry.name == CONFIG_FILE):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror or error})"
        ) from error
    return folder


def _content(folder: Path) -> list[Path]:
    """What lies in the folder, but for its lock and what killed processes left."""
    return [
        entry
        for entry in folder.iterdir()
        if not is_lock_file(entry.name) and not LEFT.fullmatch(entry.name)
    ]


def _sweep(folder: Path) -> None:
    """Delete what processes left that were killed while they wrote."""
    for entry in list(folder.iterdir()):
        if LEFT.fullmatch(entry.name):
            entry.unlink()
    for half in (folder / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(half, ignore_errors=True)


def write_config(folder: Path, config: Any, *, accepts_changes: bool = False) -> None:
    """The whole resolved config as YAML: `bertsmith VERB --config run.yaml` repeats the run.

    Args:
        folder: The run folder.
        config: The verb's.
        accepts_changes: Whether it keeps what changes a resume is to accept.

    Raises:
        UserError: It cannot be written.
    """
    values = asdict(config)
    for key in ("resume", "overwrite", *(() if accepts_changes else ("resume_override",))):
        values.pop(key, None)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    write_text(folder / CONFIG_FILE, text)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """`summary.json`: how the run ended; numbers that are not finite are null, as JSON has none."""
    text = json.dumps(_finite(dict(summary)), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / SUMMARY_FILE, text + "\n")


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(inner) for name, inner in value.items()}
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def write_text(path: Path, text: str) -> None:
    """Write a file of the run, whole or not at all.

    Raises:
        UserError: It cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the process on a CPU, of the device's allocator on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def versions() -> dict[str, str]:
    """What the run was made with."""
    packages = ("torch", "numpy", "tokenizers", "safetensors")
    return {
        "bertsmith": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }
