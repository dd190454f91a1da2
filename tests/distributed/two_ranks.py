"""Runs a function on ranks of a gloo group, each a process of its own on this machine's CPU."""

import importlib.util
import inspect
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120.0
"""After this the ranks are killed and the test fails: a collective that nobody joins never ends."""


def run_ranks(fn: Callable[[int, int], Any], world_size: int, folder: Path) -> list[Any]:
    """What `fn(rank, world_size)` gives on each rank.

    Args:
        fn: At the top level of its file; gives what `torch.save` can write without pickled code.
            The default process group is there while it runs.
        world_size: Processes.
        folder: An empty one, for the meeting point and the answers.

    Raises:
        AssertionError: A rank failed, with its traceback, or did not end in time.
    """
    spawn = multiprocessing.get_context("spawn")
    where = (inspect.getfile(fn), fn.__name__)
    ranks = [
        spawn.Process(target=_run_rank, args=(*where, rank, world_size, str(folder)))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    until_seconds = time.monotonic() + TIMEOUT_SECONDS
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < until_seconds:
            if any(p.exitcode for p in ranks):  # the others would wait for it
                break
            time.sleep(0.02)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    failures = [path.read_text() for path in sorted(folder.glob("failure-*.txt"))]
    assert not failures, "\n".join(failures)
    codes = [p.exitcode for p in ranks]
    assert not any(codes), f"exit codes {codes}: a rank was killed, or not done in time"
    return [
        torch.load(folder / f"answer-{rank}.pt", weights_only=True) for rank in range(world_size)
    ]


def _run_rank(file: str, name: str, rank: int, world_size: int, folder: str) -> None:
    try:
        torch.set_num_threads(1)
        # Read from its file: pytest gives test modules names that another process cannot import.
        spec = importlib.util.spec_from_file_location(f"ranks_of_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting-point",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        torch.save(getattr(module, name)(rank, world_size), Path(folder) / f"answer-{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank}:\n{traceback.format_exc()}"
        (Path(folder) / f"failure-{rank}.txt").write_text(text)
        os._exit(1)
