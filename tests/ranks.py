"""Ranks for tests: real processes that meet over gloo on this machine."""

import multiprocessing
import os
import pickle
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.place import Place
from bertsmith.parallel.world import joined

PATIENCE_SECONDS = 240.0


def place_of(rank: int, size: int = 2, *, has_agent: bool = False, port: int = 29500) -> Place:
    """A rank of a run on this machine, without a process of its own."""
    return Place(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        host="127.0.0.1",
        port=port,
        has_agent=has_agent,
        run_id="job",
    )


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(work: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    """What `work(world, *args)` gave on each rank of a gloo group; `work` may use the group.

    Raises:
        RuntimeError: A rank failed, whose traceback stands on standard error, or gave no answer.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, work, args, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    until = time.monotonic() + PATIENCE_SECONDS
    try:
        while len(found) < size:
            with suppress(queue.Empty):
                rank, answer = answers.get(timeout=0.1)
                found[rank] = pickle.loads(answer)
            codes = [process.exitcode for process in processes]
            if any(codes) or time.monotonic() > until:  # the others would wait for it
                raise RuntimeError(f"of {size} ranks {sorted(found)} answered; exit codes {codes}")
    finally:
        for process in processes:
            process.join(timeout=20.0 if len(found) == size else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _rank(
    rank: int, size: int, port: int, work: Callable[..., Any], args: tuple[Any, ...], answers: Any
) -> None:
    os.environ |= environment_of(rank, size, port)
    torch.set_num_threads(1)
    config = ParallelConfig(timeout_seconds=100.0, join_seconds=100.0)
    with joined(config, on_gpus=False, facts={}) as world:
        answers.put((rank, pickle.dumps(work(world, *args))))


def start_ranks(
    argv: Sequence[str], *, size: int = 2, port: int | None = None, before: str = "", **extra: str
) -> list[subprocess.Popen[str]]:
    """`bertsmith ARGV` as ranks that nobody supervises.

    Args:
        argv: The command line; `{rank}` in it is each rank's number.
        size: World size that the ranks are told.
        port: Where they meet; None: a free one.
        before: Python that each runs first, to break something.
        extra: More environment.
    """
    port = port or free_port()
    started = []
    for rank in range(size):
        words = [word.replace("{rank}", str(rank)) for word in argv]
        code = f"{before}\nimport sys\nfrom bertsmith import cli\nsys.exit(cli.run({words!r}))"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | environment_of(rank, size, port) | extra,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ends_of(
    ranks: Sequence[subprocess.Popen[str]], *, wait_for: int, seconds: float
) -> list[tuple[int, str]]:
    """Exit code and standard error of each; all but the first `wait_for` are killed in the end.

    Args:
        ranks: As `start_ranks` gave them.
        wait_for: How many have to end by themselves.
        seconds: They have altogether.
    """
    until = time.monotonic() + seconds
    found = []
    try:
        for rank in ranks[:wait_for]:
            _, errors = rank.communicate(timeout=max(until - time.monotonic(), 0.1))
            found.append((rank.returncode, errors))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return found
