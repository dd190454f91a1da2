"""Runs of bertsmith that a test breaks, and what they leave behind."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ranks import environment_of, free_port

INJECTOR = Path(__file__).parents[1] / "faults" / "injector"
PATIENCE_SECONDS = 300.0
"""For one run; a busy machine is slow, a hang is for ever."""

TRACE_SECONDS = 2.0
"""For a run that hangs to write where its threads are."""

STATE_FILES = ("model.safetensors", "training_state.safetensors")
MANIFEST = "manifest.json"


def fault(at: str, do: str, **more: Any) -> dict[str, Any]:
    """An item of the injector's list; see `injector/sitecustomize.py`."""
    return {"at": at, "do": do, **more}


def environment_with(*faults: Mapping[str, Any], **more: str) -> dict[str, str]:
    """The environment of a child process, with faults."""
    path = os.pathsep.join([str(INJECTOR), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path.strip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        # Arrow's own allocator starts a thread, and a fork of a process with threads may hang.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    if faults:
        environment["BERTSMITH_TEST_FAULT"] = json.dumps(faults)
    return environment | more


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run that goes on beside the test."""

    process_id: int
    stem: Path

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        path = self.stem.with_suffix(".exit")
        return int(path.read_text()) if path.exists() else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it still runs."""
        if self.code() is None:
            os.kill(self.process_id, number)

    def end(self, *, within_seconds: float = PATIENCE_SECONDS) -> "Ended":
        """Wait for it.

        Raises:
            AssertionError: It takes too long, and is killed.
        """
        until = time.monotonic() + within_seconds
        while (code := self.code()) is None:
            if time.monotonic() > until:
                self.kill(signal.SIGABRT)  # faulthandler then writes every thread's traceback
                time.sleep(TRACE_SECONDS)
                self.kill()
                raise AssertionError(f"still running after {within_seconds} s:\n{self.errors()}")
            time.sleep(0.005)
        return Ended(code, self.stem.with_suffix(".out").read_text(), self.errors())

    def errors(self) -> str:
        """Standard error so far."""
        path = self.stem.with_suffix(".err")
        return path.read_text(errors="replace") if path.exists() else ""  # not yet


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    errors: str

    def must(self, *codes: int) -> Self:
        """Itself, if it ended with one of these codes (0 if none is given)."""
        assert self.code in (codes or (0,)), f"exit code {self.code}\n{self.out}\n{self.errors}"
        return self


class Zygote:
    """Starts runs by forking a process that has imported everything (`zygote.py`)."""

    def __init__(self, scratch: Path) -> None:
        """Start it; `scratch` takes what runs print."""
        self._scratch, self._count = scratch, 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            env=environment_with(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(
        self,
        argv: Sequence[str | Path],
        *faults: Mapping[str, Any],
        before: str = "",
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """Run `bertsmith ARGV` beside the test.

        Args:
            argv: The command line.
            faults: For the injector.
            before: Python to run in the process first.
            cwd: Where to run it; None: here.
            environment: More of it.
        """
        with self._lock:
            self._count += 1
            stem = self._scratch / f"run-{self._count}"
            request = {
                "argv": [str(word) for word in argv],
                "environment": environment_with(*faults, **(environment or {})),
                "before": before,
                "cwd": str(cwd or ""),
                "stem": str(stem),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return Started(process_id=int(self._read()), stem=stem)

    def run(
        self,
        argv: Sequence[str | Path],
        *faults: Mapping[str, Any],
        before: str = "",
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """As `start`, to its end."""
        return self.start(argv, *faults, before=before, cwd=cwd, environment=environment).end()

    def start_ranks(
        self,
        argv: Sequence[str | Path],
        *faults: Mapping[str, Any],
        size: int = 2,
        before: str = "",
    ) -> list[Started]:
        """`bertsmith ARGV` as ranks that nobody supervises."""
        port = free_port()
        return [
            self.start(argv, *faults, before=before, environment=environment_of(rank, size, port))
            for rank in range(size)
        ]

    def close(self) -> None:
        """End it, and what it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20.0)
        assert self._process.stdout is not None
        self._process.stdout.close()


def checkpoints_of(run: Path) -> list[int]:
    """Steps that have a folder of a checkpoint, ascending."""
    names = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint holds what its manifest says: a second opinion on bertsmith's own."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        contents = {name: (checkpoint / name).read_bytes() for name in files}
    except (OSError, ValueError, KeyError):
        return False
    return bool(files) and all(
        facts["bytes"] == len(contents[name])
        and facts["sha256"] == hashlib.sha256(contents[name]).hexdigest()
        for name, facts in files.items()
    )


def whole_checkpoints(run: Path) -> list[int]:
    """Steps whose checkpoint is whole."""
    return [n for n in checkpoints_of(run) if is_whole(run / "checkpoints" / f"step-{n}")]


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """sha256 of weights and moments, and how far the run was, times left out."""
    found = {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in STATE_FILES
    }
    state = json.loads((checkpoint / "training_state.json").read_bytes())["state"]
    kept = {key: value for key, value in state.items() if "seconds" not in key}
    return found | {"state": json.dumps(kept, sort_keys=True)}


def final_hashes(run: Path) -> dict[str, str]:
    """Of the last checkpoint and of the model that the run gives away."""
    model = (run / "model" / "model.safetensors").read_bytes()
    last = run / "checkpoints" / f"step-{checkpoints_of(run)[-1]}"
    return hashes_of(last) | {"model": hashlib.sha256(model).hexdigest()}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a torn last one is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, of steps and of evaluations, in the file's order; no times."""
    return [
        {name: value for name, value in line.items() if "second" not in name}
        for line in metrics_of(run)
    ]


def losses_of(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each training step that was logged, in the file's order."""
    return [(line["step"], line["loss"]) for line in metrics_of(run) if "loss" in line]


def until(is_so: Callable[[], bool], run: Started, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something is so while the run goes on.

    Raises:
        AssertionError: The run ends before, or it takes too long.
    """
    give_up = time.monotonic() + seconds
    while not is_so():
        assert run.code() is None, f"ended with {run.code()} too soon:\n{run.errors()}"
        assert time.monotonic() < give_up, f"waited {seconds} s:\n{run.errors()}"
        time.sleep(0.002)
