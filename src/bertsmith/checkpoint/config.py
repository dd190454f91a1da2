"""When checkpoints are made, how many are kept, and what a disk that fails means."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints: when, how many are kept, and what to do where the disk fails."""

    every_steps: int | None = None
    """Save each time so many steps are done; None: by the clock, at the end and on a signal."""

    every_minutes: float | None = 10.0
    """Save when so many minutes have passed since the last one."""

    keep_last: int = 2
    """Newest checkpoints that are kept."""

    keep_best: int = 1
    """Checkpoints with the best validation score that are kept besides; only those count that were
    made right after an evaluation."""

    on_disk_error: Literal["continue", "stop"] = "continue"
    """What follows when a checkpoint, the metrics or the best model cannot be written (disk full,
    read-only, I/O error). continue: say so, train on, try again. stop: end the run, resumable from
    the last good checkpoint, with exit code 75."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        for name in ("every_steps", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.keep_best < 0:
            raise ValueError(f"keep_best is {self.keep_best}; it must not be negative")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"every_minutes is {self.every_minutes}; it must be > 0, or null")
