"""The commit protocol: a checkpoint is there whole, or not at all.

    .tmp-step-N-PID/  every file written, then manifest.json: size and sha256 of each
                      all of them flushed to the disk, then the folder itself
    step-N/           one rename makes it real; the parent folder flushed

A process killed at any of these points leaves the checkpoints before it as they were, and at most a
temporary folder that the next save deletes.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bertsmith.checkpoint.manifest import MANIFEST, facts_of, render
from bertsmith.durable import rename, why_not_written, write_folder

TEMPORARY, REPLACED = ".tmp-step-", ".old-step-"


class NotWrittenError(Exception):
    """A checkpoint could not be written; those before it are untouched. One line says why."""


def commit(
    folder: Path,
    *,
    step: int,
    write: Callable[[Path], None],
    about: Mapping[str, Any],
    needed_bytes: int,
) -> Path:
    """Write `folder/step-N` and return it; a checkpoint of the same step is replaced.

    Args:
        folder: The run's checkpoints folder.
        step: N.
        write: Fills the folder that it is given with files.
        about: What the manifest says besides (JSON values).
        needed_bytes: About what `write` writes, to say what a full disk lacks.

    Raises:
        NotWrittenError: The disk is full, forbids it, or fails; nothing half is left.
    """
    final = folder / f"step-{step}"

    def write_with_manifest(fresh: Path) -> None:
        write(fresh)
        files = {path.name: facts_of(path) for path in sorted(fresh.iterdir())}
        text = render({**about, "step": step, "files": files})
        (fresh / MANIFEST).write_text(text, encoding="utf-8")

    try:
        for left in folder.glob(f"{TEMPORARY}*"):  # of processes that were killed while saving
            shutil.rmtree(left, ignore_errors=True)
        write_folder(
            final,
            fresh=folder / f"{TEMPORARY}{step}-{os.getpid()}",
            aside=folder / f"{REPLACED}{step}",
            write=write_with_manifest,
        )
    except OSError as error:
        reason = why_not_written(error, folder, needed_bytes=needed_bytes)
        raise NotWrittenError(f"{final}: the checkpoint could not be written ({reason})") from error
    return final


def recover_replaced(folder: Path) -> None:
    """Put a checkpoint back that a process killed between two renames had moved aside.

    Raises:
        OSError: It cannot be.
    """
    for aside in folder.glob(f"{REPLACED}*"):
        final = folder / f"step-{aside.name.removeprefix(REPLACED)}"
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            rename(aside, final)
