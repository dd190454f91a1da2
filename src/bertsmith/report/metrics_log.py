"""The numbers of a run as files: `metrics.jsonl` for programs, `tensorboard/` for eyes."""

import json
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from bertsmith.errors import UserError
from bertsmith.parallel.world import World
from bertsmith.report.run_folder import write_text

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends a line a logged step and flushes it, so that a killed run keeps what it logged."""

    def __init__(self, folder: Path, *, steps_done: int) -> None:
        """Open for appending; lines of steps after `steps_done` are of a run that is redone.

        Args:
            folder: The run folder.
            steps_done: Steps of the checkpoint that the run goes on from; 0 for a new run.
        """
        self._path = folder / METRICS_FILE
        try:
            kept = [line for line in self._lines() if _step_of(line) <= steps_done]
            write_text(self._path, "".join(kept))
            losses = (json.loads(line).get("loss") for line in reversed(kept))
            self.last_loss: float | None = next((x for x in losses if x is not None), None)
            self._file = self._path.open("a", encoding="utf-8")
            self._events = EventFileWriter(str(folder / "tensorboard"), flush_secs=30)
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
        self._file.close()
        self._events.close()

    def write(self, step: int, values: dict[str, float], *, at_seconds: float) -> None:
        """One line: the step and its values; a value that is not finite becomes null.

        Args:
            step: Steps done.
            values: By name.
            at_seconds: Wall-clock time, for TensorBoard.
        """
        line = {"step": step} | {k: v if math.isfinite(v) else None for k, v in values.items()}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror})") from error
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._events.add_event(Event(wall_time=at_seconds, step=step, summary=summary))

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]  # the last one may be torn


def open_metrics(
    world: World, folder: Path, *, steps_done: int
) -> AbstractContextManager[MetricsLog | None]:
    """Rank 0's log; the other ranks have none."""
    return MetricsLog(folder, steps_done=steps_done) if world.is_main else nullcontext()


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
