"""Ranks for tests: real processes that meet over gloo on this machine."""

import multiprocessing
import os
import pickle
import queue
import socket
from collections.abc import Callable
from typing import Any

from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.world import World, joined

PATIENCE_SECONDS = 240.0


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
    """What `work(world, *args)` gave on each rank.

    Raises:
        RuntimeError: A rank ended without an answer.
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
    try:
        for _ in range(size):
            rank, answer = answers.get(timeout=PATIENCE_SECONDS)
            found[rank] = pickle.loads(answer)
    except queue.Empty:
        raise RuntimeError(f"ranks {sorted(set(range(size)) - found.keys())} are silent") from None
    finally:
        for process in processes:
            process.join(timeout=20.0)
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(size)]


def _rank(
    rank: int, size: int, port: int, work: Callable[..., Any], args: tuple[Any, ...], answers: Any
) -> None:
    import torch  # noqa: PLC0415 - the environment comes first

    os.environ |= environment_of(rank, size, port)
    torch.set_num_threads(1)
    config = ParallelConfig(timeout_seconds=100.0, join_seconds=100.0)
    with joined(config, facts={}) as world:
        assert isinstance(world, World)
        answers.put((rank, pickle.dumps(work(world, *args))))
