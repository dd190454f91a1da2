"""Run two training programs side by side: A some steps, B some steps, A again, and so on.

Each side is a worker process that stays alive. It prints one JSON object a line: first
`{"ready": ...}` with facts about itself, then for each `run N` read from standard input one list
of measured steps, and for `quit` its peak memory. While one side runs the other sleeps, so both see
the same machine, whatever else it does; a figure is the ratio of the two, not one of them alone.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step as a worker saw it."""

    seconds: float
    tokens: int
    """Real tokens, special ones counted, padding never."""

    examples: int
    """Sequences in the step."""

    useful_flop: float
    """Work that cannot be avoided; see `bertsmith.model.flops`."""

    loss: float


@dataclass
class Worker:
    """A training program that runs so many steps when asked."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    peak_rss_bytes: int = 0

    def start(self) -> None:
        """Launch and wait until it has read its data and built its model."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | self.environment,
        )
        self.facts = self._read()["ready"]

    def run(self, num_steps: int, *, is_warmup: bool = False) -> None:
        """Run steps and keep their measurements, unless they only warm up."""
        self._write(f"run {num_steps}")
        measured = [Step(**s) for s in self._read()["steps"]]
        if not is_warmup:
            self.steps += measured

    def stop(self) -> None:
        """Ask for the peak memory and let it end."""
        self._write("quit")
        self.peak_rss_bytes = self._read()["peak_rss_bytes"]
        self.process.wait(timeout=120)

    def summary(self) -> dict[str, Any]:
        """Rates over all measured steps: sums, not means of rates."""
        seconds = sum(s.seconds for s in self.steps)
        tokens = sum(s.tokens for s in self.steps)
        return {
            "name": self.name,
            "steps": len(self.steps),
            "seconds": round(seconds, 2),
            "real_tokens_per_second": round(tokens / seconds, 1),
            "examples_per_second": round(sum(s.examples for s in self.steps) / seconds, 1),
            "useful_gflop_per_second": round(
                sum(s.useful_flop for s in self.steps) / seconds / 1e9, 1
            ),
            "tokens_per_step": round(tokens / len(self.steps), 1),
            "step_seconds_median": round(statistics.median(s.seconds for s in self.steps), 4),
            "peak_rss_gib": round(self.peak_rss_bytes / 2**30, 2),
            "first_loss": round(self.steps[0].loss, 4),
            "last_loss": round(statistics.fmean(s.loss for s in self.steps[-5:]), 4),
            **self.facts,
        }

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                message: dict[str, Any] = json.loads(line)
                return message
        raise RuntimeError(f"{self.name} ended without an answer: {' '.join(self.command)}")


def interleave(workers: list[Worker], *, steps: dict[str, int], rounds: int, warmup: int) -> None:
    """Let the workers take turns until each has run its steps; A B A B ...

    Args:
        workers: Started here, one after the other, and stopped at the end.
        steps: Measured steps of each worker by name.
        rounds: Turns each worker gets.
        warmup: Steps of each that are run first and not counted.
    """
    for worker in workers:
        worker.start()
        worker.run(warmup, is_warmup=True)
    for turn in range(rounds):
        for worker in workers:
            done, total = len(worker.steps), steps[worker.name]
            worker.run(round(total * (turn + 1) / rounds) - done)
            print(
                f"  turn {turn + 1}/{rounds} {worker.name:<36}"
                f"{worker.summary()['real_tokens_per_second']:>10,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    for worker in workers:
        worker.stop()


def serve(ready: dict[str, Any], run_steps: Iterable[Step]) -> None:
    """A worker's side of the conversation.

    Args:
        ready: Facts to tell first.
        run_steps: Yields a `Step` each time the program has finished one.
    """
    import resource

    reply({"ready": ready})
    steps = iter(run_steps)
    for line in sys.stdin:
        if line.startswith("quit"):
            break
        measured = [next(steps) for _ in range(int(line.split()[1]))]
        reply({"steps": [vars(s) for s in measured]})
    reply({"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
    os._exit(0)  # a Trainer cannot be left from the middle; there is nothing to clean up


def reply(message: dict[str, Any]) -> None:
    """Print one message for the driver."""
    print(json.dumps(message), flush=True)


def worker_command(script: str, **arguments: str | float | None) -> list[str]:
    """The command line of a worker script beside this file."""
    command = [sys.executable, str(HERE / script)]
    for key, value in arguments.items():
        if value is not None:
            command += [f"--{key.replace('_', '-')}", str(value)]
    return command
