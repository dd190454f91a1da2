"""How a rank ends: what is said, by whom, and with which exit code."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from bertsmith.errors import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    NOTHING_YET,
    UserError,
)
from bertsmith.parallel.heart import (
    GRACE_SECONDS,
    LAST_RESORT_SECONDS,
    Heart,
    OtherRankFailedError,
    SilentRankError,
)
from bertsmith.parallel.partition import end_for_lack_of_answer
from bertsmith.parallel.place import Place

WORD_SECONDS = 3.0
"""In which a rank that fails says so, before the others go and find out whom they miss."""


def end(error: BaseException, place: Place, heart: Heart) -> int:
    """Say once, on one rank, what ended the run, and leave the process group.

    Args:
        error: What ended this rank.
        place: This rank's.
        heart: Tells of the other ranks.

    Returns:
        The exit code, the same on every rank.
    """
    with last_resort(place, "its end", after_seconds=LAST_RESORT_SECONDS):
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends ranks that are left
        with heart.at_work():  # it has a deadline of its own
            code = _agree(error, place, heart)
        leave_group(code)
    return code


@contextmanager
def last_resort(place: Place, doing: str, *, after_seconds: float) -> Iterator[None]:
    """End the process if the block takes too long.

    The store's client has no limit for some of its waits, whatever it was told.

    Args:
        place: This rank's.
        doing: What the block does, in words that fit "rank 3 is cut off at ...".
        after_seconds: What is too long.
    """
    timer = threading.Timer(after_seconds, end_for_lack_of_answer, (place, doing))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave_group(code: int | None = None) -> None:
    """Give up the process group; a process that cannot, after a failure, is ended here.

    NCCL may wait without end for a collective that another rank will never come to, and would do so
    once more when the interpreter ends.

    Args:
        code: Exit code after a failure; None after a run that ended well.
    """
    if not dist.is_initialized():
        return
    if code is None:
        _destroy_group()
        return
    leaving = threading.Thread(target=_destroy_group, name="leaving", daemon=True)
    leaving.start()
    leaving.join(GRACE_SECONDS)
    if leaving.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _destroy_group() -> None:
    with suppress(Exception):  # the run is over, and how it ended has been told
        dist.destroy_process_group()


def _agree(error: BaseException, place: Place, heart: Heart) -> int:
    """The exit code of the rank that failed first, which is the one to say why."""
    is_of_another = isinstance(error, SilentRankError) or is_of_the_network(error)
    try:
        code = None
        if isinstance(error, OtherRankFailedError) or is_of_another:
            code = heart.failure_code(within_seconds=WORD_SECONDS)
        if code is not None:
            heart.acknowledge()
            return code
        code = _code_of(error)
        lost = heart.missing() if is_of_another else None
        if not heart.claim_failure(code=code):
            heart.acknowledge()
            return heart.failure_code() or code
    except (dist.DistError, RuntimeError):  # the store has gone with the rank that held it
        print(
            f"bertsmith: error: rank {place.rank} has lost rank 0, which held the meeting point "
            f"at {place.host}:{place.port} ({first_line(error)})",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_FAULT
    if isinstance(error, SilentRankError):
        waited = f"{heart.silence_limit_seconds:g} seconds"
    else:
        waited = f"(--parallel.timeout_seconds {heart.timeout_seconds:g})"
    _say(error, place, lost, waited=waited)
    with suppress(dist.DistError, RuntimeError):
        heart.wait_for_the_others()
    return code


def _say(error: BaseException, place: Place, lost: str | None, *, waited: str) -> None:
    """A line for a mistake or a lost rank, a traceback for a fault of ours."""
    of_rank = f"rank {place.rank}: " if place.rank else ""
    if lost is not None:
        print(f"bertsmith: error: {lost}; rank {place.rank} waited {waited}", file=sys.stderr)
    elif isinstance(error, UserError):
        print(f"bertsmith: error: {of_rank}{error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"bertsmith: {NOTHING_YET}", file=sys.stderr)
    elif not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(error))
        print(f"bertsmith: rank {place.rank} failed:\n{text}", file=sys.stderr)
    sys.stderr.flush()


def _code_of(error: BaseException) -> int:
    match error:
        case UserError():
            return EXIT_USER_ERROR
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case SystemExit(code=int(code)):
            return code
        case _:
            return EXIT_FAULT


def is_of_the_network(error: BaseException) -> bool:
    """Whether a collective failed: another rank is to blame, not this one."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """Of an error's message, at most 200 characters."""
    return str(error).strip().split("\n", 1)[0][:200]
