"""The numbers of a run as files: `metrics.jsonl` for programs, `tensorboard/` for eyes."""

import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.durable import flush, why_not_written, write_whole
from bertsmith.errors import UserError
from bertsmith.parallel.world import World
from bertsmith.say import Say

METRICS_FILE = "metrics.jsonl"

SCORE_PREFIX, COVERAGE_PREFIX = "valid_", "coverage_"
"""Begin the names of an evaluation's numbers."""

MOST_WAITING_LINES = 10_000
"""Lines that wait in memory for a disk that is full; older ones are given up."""


class MetricsLog:
    """Appends a line a logged step and flushes it, so that a killed run keeps what it logged.

    A disk that is full keeps no line: what could not be written waits in memory, and is written
    before the next line that can be. So does what is to be dropped.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps_done: int,
        say: Say,
        is_judged_again: bool = False,
    ) -> None:
        """Open for appending; lines of steps after `steps_done` are of a run that is redone.

        Args:
            folder: The run folder.
            steps_done: Steps of the checkpoint that the run goes on from; 0 for a new run.
            say: Told in a line when lines begin to wait.
            is_judged_again: Whether the weights of that checkpoint are evaluated (again), so that
                what was scored of them is dropped as well.

        Raises:
            UserError: The files cannot be opened.
        """
        self._path, self._say = folder / METRICS_FILE, say
        self._waiting: list[str] = []
        self._has_left = False
        self._writing = threading.RLock()  # the saver flushes from a thread of its own
        self._file: TextIO | None = None
        cut = _Cut(steps_done=steps_done, drops_scores=is_judged_again)
        self._cut: _Cut | None = cut
        try:
            self._ready()
            self._board = _TensorBoard(folder / "tensorboard", is_new=steps_done == 0)
            self._rewind_board(cut)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # the disk is still full
            self._write_waiting()
        self._close()
        self._board.close()

    @property
    def is_waiting(self) -> bool:
        """Whether there is something that could not be written yet."""
        return bool(self._waiting) or self._cut is not None

    def write(self, step: int, values: dict[str, float], *, at_seconds: float) -> None:
        """One line: the step and its values; a value that is not finite becomes null.

        If it cannot be written it waits, and that is said once.

        Args:
            step: Steps done.
            values: By name.
            at_seconds: Wall-clock time, for TensorBoard.
        """
        if self._has_left:
            return
        line = {"step": step} | {k: v if math.isfinite(v) else None for k, v in values.items()}
        with self._writing, self._saying_what_waits():
            self._waiting = [*self._waiting, json.dumps(line) + "\n"][-MOST_WAITING_LINES:]
            self._write_waiting()
        self._board.write(step, values, at_seconds=at_seconds)

    def leave_folder(self) -> None:
        """Write nothing more, not even what waits: the folder is another run's by now."""
        with self._writing:
            self._has_left, self._waiting = True, []

    def flush_to_disk(self) -> None:
        """Have the disk hold every line: a checkpoint is to come that they lead to.

        Raises:
            NotWrittenError: It does not.
        """
        try:
            with self._writing:
                self._write_waiting()
                flush(self._path)
        except OSError as error:
            reason = why_not_written(error, self._path)
            raise NotWrittenError(f"{self._path}: cannot be written ({reason})") from error

    def rewind(self, steps_done: int, *, is_judged_again: bool = False) -> None:
        """Drop lines of steps after `steps_done`, which are done over.

        If the file cannot be written, that waits too, and is said.

        Args:
            steps_done: Steps of the checkpoint that the run has gone back to.
            is_judged_again: As for the start.
        """
        cut = _Cut(steps_done=steps_done, drops_scores=is_judged_again)
        with self._writing, self._saying_what_waits():
            self._waiting = [line for line in self._waiting if cut.keeps(line)]
            self._cut = cut if self._cut is None else self._cut.and_then(cut)
            self._close()
            self._write_waiting()
        with suppress(OSError):
            self._rewind_board(cut)

    def _rewind_board(self, cut: "_Cut") -> None:
        """As the lines; where scores alone are dropped, what stands beside them is written anew."""
        if not cut.steps_done:
            return
        self._board.rewind(cut.steps_done - cut.drops_scores)
        if not cut.drops_scores:
            return
        for line in filter(cut.keeps, _lines_of(self._path)):
            values = json.loads(line)
            if values.pop("step") == cut.steps_done:
                known = {name: value for name, value in values.items() if value is not None}
                self._board.write(cut.steps_done, known, at_seconds=time.time())

    @contextmanager
    def _saying_what_waits(self) -> Iterator[None]:
        """Around what may fail on a full disk: said once, and tried again with the next line."""
        was_waiting = self.is_waiting
        try:
            yield
        except OSError as error:
            if not was_waiting:
                reason = why_not_written(error, self._path)
                self._say(f"{self._path}: cannot be written ({reason}); its lines wait in memory")

    def _write_waiting(self) -> None:
        """Write the lines that wait, whole, so that one in the file is never a part of one."""
        file = self._ready()
        while self._waiting:
            try:
                file.write(self._waiting[0])
                file.flush()
            except OSError:
                # The text layer keeps what it could not write and would try again: a new one, which
                # first takes back the part of a line that was written, does not.
                self._close()
                raise
            del self._waiting[0]

    def _ready(self) -> TextIO:
        """The file, open at the end of its last whole line, what is to be dropped dropped."""
        if self._file is not None and not _is_at(self._file, self._path):
            self._close()
            self._say(f"{self._path}: was deleted or replaced; lines are written to a new one")
        if self._file is None:
            if self._cut is not None:
                write_whole(self._path, "".join(filter(self._cut.keeps, _lines_of(self._path))))
                self._cut = None
            _drop_half_a_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Lines that a run writes anew."""

    steps_done: int
    """Lines of later steps are dropped."""

    drops_scores: bool
    """And the scores of this very step."""

    def keeps(self, line: str) -> bool:
        """Whether a line stays; one that is torn does not."""
        try:
            values = json.loads(line)
            step = int(values["step"])
        except (ValueError, KeyError, TypeError):
            return False
        if self.drops_scores and any(
            name.startswith((SCORE_PREFIX, COVERAGE_PREFIX)) for name in values
        ):
            return step < self.steps_done
        return step <= self.steps_done

    def and_then(self, later: Self) -> Self:
        """Both in one."""
        return min(self, later, key=lambda cut: (cut.steps_done, not cut.drops_scores))


def _lines_of(path: Path) -> list[str]:
    """Whole lines of a file; none if it is not there."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _drop_half_a_line(path: Path) -> None:
    """Take back the part of a line that a full disk let through, at the end of a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


class _TensorBoard:
    """Event files; whoever cannot write them goes without."""

    def __init__(self, folder: Path, *, is_new: bool) -> None:
        folder.mkdir(exist_ok=True)
        if is_new:  # curves of a run that is done over from its start
            shutil.rmtree(folder)
            folder.mkdir()
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records: RecordWriter | None = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def rewind(self, steps_done: int) -> None:
        """Have TensorBoard drop what earlier files say of later steps."""
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=steps_done + 1, session_log=start))

    def write(self, step: int, values: dict[str, float], *, at_seconds: float) -> None:
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._write(Event(wall_time=at_seconds, step=step, summary=summary))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _write(self, event: Event) -> None:
        if self._records is None:
            return
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError:  # half a record ends a file for its readers: no more of it
            self._records = None


def open_metrics(
    world: World,
    folder: Path,
    *,
    steps_done: int,
    say: Say,
    is_judged_again: bool,
) -> AbstractContextManager[MetricsLog | None]:
    """Rank 0's log, as `MetricsLog`; the other ranks have none."""
    if not world.is_main:
        return nullcontext()
    return MetricsLog(folder, steps_done=steps_done, say=say, is_judged_again=is_judged_again)
