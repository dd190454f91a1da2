"""What a person sees while a verb runs: a live line on a terminal, plain lines in a log.

Everything goes to standard error and to the run's `log.txt`, so that standard output stays the
result's.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""In a log that nobody watches live, progress is one line in this time."""


class Speaker:
    """Says lines to a person and to the run's log."""

    def __init__(self, folder: Path | None = None, *, stream: TextIO | None = None) -> None:
        """Speak to standard error, and append to `folder/log.txt` if a folder is given."""
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._log = None if folder is None else folder / "log.txt"

    @classmethod
    def silent(cls) -> Self:
        """One that says nothing: for the ranks that another speaks for."""
        return cls(stream=open(os.devnull, "w", encoding="utf-8"))

    @property
    def is_live(self) -> bool:
        """Whether a person watches a terminal."""
        return self.console.is_terminal

    def say(self, line: str) -> None:
        """Print and log a line."""
        self.console.print(line, markup=False)
        self.log(line)

    def log(self, line: str) -> None:
        """Log a line without printing it."""
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n")
        except OSError:
            self._log = None  # a full disk must not end the run for the sake of its log


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the training line shows."""

    step: int
    progress: float
    """Share of the budget spent."""

    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    gemm_share: float | None
    """Useful FLOP/s over the machine's GEMM rate; None if not measured."""

    @property
    def text(self) -> str:
        """The line."""
        parts = [
            f"step {self.step:,}",
            f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
            f"grad {self.grad_norm:.2f}",
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.gemm_share is not None:
            parts.append(f"{self.gemm_share:.0%} of GEMM")
        return "  ".join(parts)


class TrainingDisplay:
    """The training line: live with a bar and time left, or one line now and then."""

    def __init__(self, speaker: Speaker) -> None:
        """Nothing is shown before `with`."""
        self._speaker = speaker
        self._shown_at_seconds = self._began_at_seconds = time.monotonic()
        self._first_progress: float | None = None
        self._bar: Progress | None = None
        if speaker.is_live:
            self._bar = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>5.1f}%"),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=speaker.console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, reading: Reading, *, is_last: bool) -> None:
        """Bring the line up to date."""
        if self._first_progress is None:
            self._first_progress = reading.progress
        if self._bar is not None:
            self._bar.update(self._task, completed=reading.progress, description=reading.text)
            return
        now = time.monotonic()
        if is_last or now - self._shown_at_seconds >= LINE_SECONDS or reading.step == 1:
            self._shown_at_seconds = now
            done = reading.progress - self._first_progress
            left = (1.0 - reading.progress) * (now - self._began_at_seconds)
            ends = f"  {_duration(left / done)} left" if done > 0.0 and not is_last else ""
            self._speaker.say(f"{reading.progress:6.1%}  {reading.text}{ends}")


class BytesDisplay:
    """Progress in bytes with rate and time left: `prepare` and other readers of big files."""

    def __init__(self, speaker: Speaker, what: str) -> None:
        """Nothing is shown before the first call of `advance`."""
        self._speaker, self._what = speaker, what
        self._began_at_seconds = self._shown_at_seconds = time.monotonic()

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is; called often, shows seldom."""
        now = time.monotonic()
        pause = 0.5 if self._speaker.is_live else LINE_SECONDS
        is_done = done_bytes >= total_bytes
        if now - self._shown_at_seconds < pause and not is_done:
            return
        self._shown_at_seconds = now
        rate = done_bytes / max(now - self._began_at_seconds, 1e-9)
        left = (total_bytes - done_bytes) / max(rate, 1e-9)
        line = (
            f"{self._what}  {done_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB  "
            f"{rate / 1e6:,.1f} MB/s  {_duration(left)} left"
        )
        if self._speaker.is_live and not is_done:
            self._speaker.console.print(line, markup=False, end="\r")
        else:
            self._speaker.say(line)


def _duration(seconds: float) -> str:
    """1:05:09, or 5:09."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
