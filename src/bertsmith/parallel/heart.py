"""A thread in every rank that says "I am alive, at step N", and sees when another rank is not.

It has its own connection to the store, so that a rank whose main thread waits for the others can
still find out whom it waits for. What ends a run is said once: the first rank that fails claims
the message, the others leave without a word.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A rank whose heart has not beaten for so long is dead or stopped."""

GRACE_SECONDS = 5.0
"""Time that ranks have to leave by themselves once another has failed."""

FAILURE, ACKNOWLEDGED = "failure", "failure/acknowledged"


class Heart:
    """The thread, and what can be asked about the other ranks."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_seconds: float) -> None:
        """Nothing runs yet.

        Args:
            store: A connection that nobody else uses.
            rank: This process's.
            size: Ranks.
            timeout_seconds: How long the main thread may go without `beat`.
        """
        self._store, self._rank, self._size = store, rank, size
        self._timeout_seconds = timeout_seconds
        self._beaten_at_seconds = time.monotonic()
        self._doing = "starting"
        self._ticks = 0
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_leaving.set()
        self._thread.join(timeout=GRACE_SECONDS)

    def beat(self, doing: str) -> None:
        """The main thread is at work.

        Args:
            doing: What it does, in words that fit "rank 3 was last seen at ...".
        """
        self._doing, self._beaten_at_seconds = doing, time.monotonic()

    def claim_failure(self, *, code: int) -> bool:
        """Whether this rank is the first to fail, and so has to say why.

        Args:
            code: Exit code that every rank is to end with.
        """
        mine = f"{self._rank} {code}"
        first: bytes = self._store.compare_set(FAILURE, "", mine)
        return first.decode() == mine

    def failure_code(self, *, within_seconds: float = 0.0) -> int | None:
        """The exit code claimed by the rank that failed; None if none has."""
        until = time.monotonic() + within_seconds
        while not self._store.check([FAILURE]):
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)
        return int(self._store.get(FAILURE).decode().split()[1])

    def acknowledge(self) -> None:
        """This rank knows of the failure and leaves."""
        self._store.add(ACKNOWLEDGED, 1)

    def wait_for_the_others(self) -> None:
        """Let the others learn of a failure before the store may go with this process."""
        until = time.monotonic() + GRACE_SECONDS
        while self._store.add(ACKNOWLEDGED, 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(0.1)

    def missing(self) -> str:
        """In a line, which ranks are not where this one waits for them."""
        before = self._ticks_of_all()
        time.sleep(SILENCE_SECONDS)
        after = self._ticks_of_all()
        dead = [r for r in after if after[r][0] == before.get(r, (None,))[0] and r != self._rank]
        never = [r for r in range(self._size) if r not in after]
        if never or dead:
            lines = [f"{_ranks(never)} never began"] if never else []
            if dead:
                where = after[dead[0]][1]
                lines.append(
                    f"{_ranks(dead)} stopped answering, last seen at {where} (killed, out of "
                    "memory, stopped, or cut off from the network)"
                )
            return "; ".join(lines)
        others = {r: doing for r, (_, doing) in after.items() if r != self._rank}
        late = [r for r, doing in others.items() if doing != self._doing] or list(others)
        return f"{_ranks(late)} answer but do not go on, last seen at {others[late[0]]}"

    def _ticks_of_all(self) -> dict[int, tuple[int, str]]:
        """Each rank's count of beats and what it does."""
        found: dict[int, tuple[int, str]] = {}
        for rank in range(self._size):
            key = f"beat/{rank}"
            if self._store.check([key]):
                ticks, doing = json.loads(self._store.get(key).decode())
                found[rank] = (ticks, doing)
        return found

    def _live(self) -> None:
        told_at_seconds: float | None = None
        while not self._is_leaving.wait(BEAT_SECONDS):
            self._ticks += 1
            try:
                self._store.set(f"beat/{self._rank}", json.dumps([self._ticks, self._doing]))
                code = self.failure_code()
            except (dist.DistError, RuntimeError):  # the store has gone, and with it a rank
                code = 1
            now = time.monotonic()
            if code is not None:
                told_at_seconds = told_at_seconds or now
                if now - told_at_seconds > GRACE_SECONDS:
                    _leave(code, self.acknowledge)
            elif now - self._beaten_at_seconds > self._timeout_seconds + SILENCE_SECONDS:
                self._end_a_stuck_run()

    def _end_a_stuck_run(self) -> None:
        """The main thread waits for a rank that does not come, where nothing else times out."""
        what = self.missing()
        if self.claim_failure(code=1):
            print(
                f"bertsmith: error: nothing has moved for {self._timeout_seconds:g} seconds at "
                f"{self._doing}: {what}",
                file=sys.stderr,
                flush=True,
            )
        _leave(1, self.wait_for_the_others)


def _leave(code: int, last: Callable[[], None]) -> None:
    """End the process though its main thread hangs."""
    with suppress(dist.DistError, RuntimeError):
        last()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}" + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


def connection(host: str, port: int, *, seconds: float) -> TCPStore:
    """A client of a store that another process, or this one, serves."""
    return TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
    )
