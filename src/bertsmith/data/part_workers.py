"""Units to parts in several processes.

Processes, not the tokenizers library's threads: reading, decoding and gathering ids run in Python,
and only processes run that in parallel. They are spawned, never forked, and leave when the parent
is gone.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.data.corpus import ReadOptions
from bertsmith.data.parts import PartMaker, described
from bertsmith.data.plan import Unit
from bertsmith.errors import UserError

POLL_SECONDS = 0.25
SMALL_BYTES = 1 << 20
"""Less text than this is done here, sooner than a process starts."""


def usable_cpus() -> int:
    """CPUs that this process may use; where the system does not say (macOS), all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class StoppedError(Exception):
    """The parent wants no more."""


@dataclass(kw_only=True)
class _Worker:
    """What a process keeps between units."""

    tokenizer_folder: Path
    read: ReadOptions
    done_bytes: Any
    should_stop: Any
    maker: PartMaker | None = None
    """Made for the first unit, where an error still comes out as itself."""


_worker: _Worker | None = None


def make_parts(
    units: list[Unit],
    *,
    work: Path,
    tokenizer_folder: Path,
    read: ReadOptions,
    workers: int,
    advance: Callable[[int, int], None],
) -> None:
    """Make the parts that are missing.

    Args:
        units: Work to do; what is already there is skipped.
        work: Folder of parts.
        tokenizer_folder: The tokenizer to use.
        read: How documents are found.
        workers: Most processes.
        advance: Told the bytes on disk done and in all.

    Raises:
        UserError: A document cannot be read, or a process was killed.
        WritingError: Nothing can be written.
    """
    total = sum(sum(unit.span_bytes) for unit in units)
    workers = min(workers, len(units))
    if workers <= 1 or total < SMALL_BYTES:
        _make_here(units, work, PartMaker(tokenizer_folder, read), advance, total)
        return
    context = multiprocessing.get_context("spawn")
    done_bytes, should_stop = context.Value("q", 0), context.Event()
    not_ours = multiprocessing.active_children()
    with ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_start,
        initargs=(tokenizer_folder, read, done_bytes, should_stop),
    ) as pool:
        waiting = {pool.submit(_make_one, work, unit) for unit in units}
        ours = [child for child in multiprocessing.active_children() if child not in not_ours]
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                if waiting:
                    # Without its lock, which a killed process may have held.
                    advance(done_bytes.get_obj().value, total)
            advance(total, total)
        except BrokenProcessPool as error:
            pool.shutdown(wait=True)  # which ends the others too
            left = _take_what_is_left(work, units, [child.pid for child in ours])
            killed = [child for child in ours if child.exitcode not in (0, -signal.SIGTERM)]
            places = [left[child.pid] for child in killed if child.pid in left]
            raise UserError(
                f"--workers: a process was killed{f' at {places[0]}' if places else ''}, most "
                "likely for lack of memory; what is finished is kept: run again with fewer than "
                f"{workers} workers"
            ) from error
        except BaseException:
            should_stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _take_what_is_left(work: Path, units: list[Unit], pids: list[int | None]) -> dict[int, str]:
    """Delete what killed processes had begun; return what each was at."""
    places: dict[int, str] = {}
    by_number = {unit.number: unit for unit in units}
    for folder in work.glob("part-*.tmp-*"):
        number, pid = int(folder.name.split("-")[1]), int(folder.name.rpartition("-")[2])
        if pid in pids and number in by_number:
            places[pid] = described(by_number[number])
            shutil.rmtree(folder, ignore_errors=True)
    return places


def _make_here(
    units: list[Unit],
    work: Path,
    maker: PartMaker,
    advance: Callable[[int, int], None],
    total: int,
) -> None:
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        advance(done, total)

    for unit in units:
        maker.make(work, unit, add)


def _start(tokenizer_folder: Path, read: ReadOptions, done_bytes: Any, should_stop: Any) -> None:
    """Set up a process."""
    global _worker  # noqa: PLW0603 - one a process, there is no other way to keep it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _worker = _Worker(
        tokenizer_folder=tokenizer_folder,
        read=read,
        done_bytes=done_bytes,
        should_stop=should_stop,
    )


def _leave_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _make_one(work: Path, unit: Unit) -> None:
    assert _worker is not None
    worker = _worker
    if worker.maker is None:
        worker.maker = PartMaker(worker.tokenizer_folder, worker.read)

    def add(count: int) -> None:
        if worker.should_stop.is_set():
            raise StoppedError
        with worker.done_bytes.get_lock():
            worker.done_bytes.value += count

    worker.maker.make(work, unit, add)
