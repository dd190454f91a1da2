"""What a person sees while a verb runs: a live line on a terminal, plain lines in a log.

Everything goes to standard error and to the run's `log.txt`, so that standard output stays the
result's. Neither ends a run: a disk that is full, or a terminal that is gone, loses lines and no
more.
"""

import errno
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""In a log that nobody watches live, progress is one line in this time."""


class _SteadyStream:
    """A stream whose writes raise no OSError: what cannot be written is lost.

    Nothing that failed stays in a buffer either. It would come twice when the disk is free again,
    and if it is not, Python would end with exit code 120, whatever the run's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._raw = getattr(getattr(stream, "buffer", None), "raw", None)

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._raw is None:
                self._stream.write(text)
            else:
                self._stream.flush()
                encoding, errors = self._stream.encoding, self._stream.errors or "strict"
                _write_all(self._raw, text.encode(encoding, errors))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Speaker:
    """Says lines to a person and to the run's log; from any thread."""

    def __init__(self, folder: Path | None = None, *, stream: TextIO | None = None) -> None:
        """Speak to standard error, and append to `folder/log.txt` if a folder is given."""
        steady = cast(IO[str], _SteadyStream(stream or sys.stderr))
        self.console = Console(file=steady, highlight=False, soft_wrap=True)
        self._log = None if folder is None else folder / "log.txt"
        self._lost_lines = 0
        self._writing = threading.Lock()

    @classmethod
    def silent(cls) -> Self:
        """One that says nothing: for the ranks that another speaks for."""
        return cls(stream=open(os.devnull, "w", encoding="utf-8"))

    @property
    def is_live(self) -> bool:
        """Whether a person watches a terminal."""
        return self.console.is_terminal

    def leave_folder(self) -> None:
        """Log nothing more; lines are still said."""
        self._log = None

    def say(self, line: str) -> None:
        """Print and log a line."""
        self.console.print(line, markup=False)
        self.log(line)

    def log(self, line: str) -> None:
        """Log a line without printing it.

        If it cannot be written, that is said once, and the line is lost. The next is tried again;
        the first that succeeds comes after a line that says how many are missing.
        """
        log = self._log
        if log is None:
            return
        with self._writing:
            text = _stamped(line)
            if self._lost_lines:
                text = (
                    _stamped(f"lines lost here, which could not be written: {self._lost_lines:,}")
                    + text
                )
            try:
                _append_whole(log, text.encode("utf-8", "backslashreplace"))
                self._lost_lines = 0
                return
            except OSError as error:
                self._lost_lines += 1
                reason = error.strerror or error
        if self._lost_lines == 1:
            self.console.print(
                f"{log}: cannot be written ({reason}); going on without, and trying again "
                "with each line",
                markup=False,
            )


def _stamped(line: str) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n"


def _append_whole(path: Path, content: bytes) -> None:
    """Append all of it, or leave the file as it was.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            _write_all(file, content)
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def _write_all(raw: Any, content: bytes) -> None:
    """Write to an unbuffered file, which may take less than it is given: the disk is nearly full.

    Raises:
        OSError: Not all of it was written.
    """
    left = memoryview(content)
    while left:
        written = raw.write(left)
        if not written:  # it would have to wait: nobody reads a pipe that does not block
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left = left[written:]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the training line shows."""

    step: int
    progress: float
    """Share of the budget spent."""

    loss: float
    """Mean of the last steps', with weights that fall by a tenth a step."""

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
            f"mean loss {self.loss:.4f}",
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
        line = f"{self._what}  {done_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB"
        if done_bytes:  # before the first ones nobody knows
            left = (total_bytes - done_bytes) / rate
            line += f"  {rate / 1e6:,.1f} MB/s  {_duration(left)} left"
        if self._speaker.is_live and not is_done:
            self._speaker.console.print(line, markup=False, end="\r")
        else:
            self._speaker.say(line)


def _duration(seconds: float) -> str:
    """1:05:09, or 5:09."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
