"""`run_status.json`: how a run stands or ended, for whoever started it and may start it again."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bertsmith.durable import write_whole
from bertsmith.say import Say

STATUS_FILE = "run_status.json"
Status = Literal["running", "resumable", "completed", "failed"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands."""

    status: Status
    """running; resumable: stopped, and the command goes on with it; completed; failed."""

    verb: str
    """Of the command line: pretrain or finetune."""

    step: int
    """Optimizer steps done."""

    checkpoint: str | None
    """The newest one that is safe, relative to the run folder; None if there is none."""

    command: str | None
    """How to go on, or to begin anew where nothing was saved, for a shell; None for a run that is
    completed."""

    reason: str | None = None
    """Why it stopped or failed, in a line; None if there is nothing to say."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    written_at: str = field(default_factory=_now)
    """ISO 8601, in UTC."""


def resume_command(verb: str, folder: Path, *, program: Sequence[str] = ("bertsmith",)) -> str:
    """What goes on with the run of a folder, quoted for a shell.

    Args:
        verb: pretrain or finetune.
        folder: The run folder.
        program: What starts bertsmith as this run was started.
    """
    return shlex.join([*program, verb, "--config", str(folder / "run.yaml"), "--resume"])


def write_status(folder: Path, status: RunStatus, *, log: Say | None = None) -> bool:
    """Write `run_status.json`, whole or not at all.

    It is written when something else went wrong, too: that it cannot be, on a full disk, must not
    hide what is being reported. So nothing is raised then.

    Args:
        folder: The run folder.
        status: How the run stands; a reason of several lines becomes one.
        log: Told if it cannot be written; to standard error by default.

    Returns:
        Whether it was written. If not, an older one stays.
    """
    if status.reason is not None:
        status = replace(status, reason=" ".join(status.reason.split()))
    path = folder / STATUS_FILE
    try:
        write_whole(path, json.dumps(asdict(status), indent=2) + "\n")
    except OSError as error:
        line = f"{path}: cannot be written ({error.strerror or error})"
        if log is None:
            print(line, file=sys.stderr)
        else:
            log(line)
        return False
    return True
