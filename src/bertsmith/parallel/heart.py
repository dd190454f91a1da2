"""A thread in every rank that says "I am alive, at step N", and sees when another rank is not.

It has its own connection to the store, so that a rank whose main thread waits for the others can
still find out whom it waits for. What ends a run is said once: the first rank that fails claims
the message, the others leave without a word.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from bertsmith.errors import EXIT_FAULT
from bertsmith.parallel.partition import end_for_lack_of_answer
from bertsmith.parallel.place import Place

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A rank whose heart has not beaten for so long is dead or stopped."""

GONE_SECONDS = 60.0
"""A rank that others wait for and whose heart has not beaten for so long is given up, however long
a step may take: one that was killed where nobody supervises it tells no one. Slow disks that hold
up a whole process for some seconds are borne."""

LAST_RESORT_SECONDS = 25.0
"""After which a rank ends though the store does not answer: a network that has gone tells nobody
so, and what is sent into it waits for ever."""

GRACE_SECONDS = 5.0
"""Time that ranks have to leave by themselves once another has failed."""

SAVE_SECONDS = 100
"""For a rank to end its step and save after a signal or another rank's failure, before it is
killed."""

FAILURE, ACKNOWLEDGED = "failure", "failure/acknowledged"


class OtherRankFailedError(Exception):
    """This rank has to end because another one did, which says why."""


class SilentRankError(Exception):
    """A rank that this one waits for has given no sign of life for too long."""


class Heart:
    """The thread, and what can be asked about the other ranks."""

    def __init__(self, store: Store, place: Place, *, timeout_seconds: float) -> None:
        """Nothing runs yet.

        Args:
            store: A connection that nobody else uses.
            place: This process's.
            timeout_seconds: How long the main thread may go without `beat`.
        """
        self._store, self._place = store, place
        self._rank, self._size = place.rank, place.size
        self.timeout_seconds = timeout_seconds
        self._beaten_at_seconds = time.monotonic()
        self.doing = "starting"
        self._num_works = 0
        self._is_saving = False
        self._saved_at_seconds = -math.inf
        self._ticks = 0
        self._failure_code: int | None = None
        self._has_claimed = self._has_acknowledged = False
        self._failing = threading.Lock()
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="heart", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def silence_limit_seconds(self) -> float:
        """How long another rank may be silent while this one waits for it."""
        return min(self.timeout_seconds, GONE_SECONDS)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()
        self._watchdog.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_leaving.set()
        self._thread.join(timeout=GRACE_SECONDS)

    def beat(self, doing: str) -> None:
        """The main thread is at work.

        Args:
            doing: What it does, in words that fit "rank 3 was last seen at ...".
        """
        self.doing, self._beaten_at_seconds = doing, time.monotonic()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the block the main thread may take any time; the others hear it beat."""
        self._num_works += 1
        try:
            yield
        finally:
            self._beaten_at_seconds = time.monotonic()
            self._num_works -= 1

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within the block, in any one thread, another rank's failure does not end this process.

        What is being written comes to its end first, for as long as `SAVE_SECONDS`.
        """
        self._is_saving = True
        try:
            yield
        finally:
            self._saved_at_seconds = time.monotonic()
            self._is_saving = False

    def claim_failure(self, *, code: int) -> bool:
        """Whether this thread is the first of all ranks' to fail, and so has to say why.

        Args:
            code: Exit code that every rank is to end with.
        """
        with self._failing:
            if self._failure_code is not None:
                return False
            mine = f"{self._rank} {code}"
            first = self._store.compare_set(FAILURE, "", mine).decode()
            self._failure_code = _code_in(first)
            self._has_claimed = first == mine
            return self._has_claimed

    def failure_code(self, *, within_seconds: float = 0.0) -> int | None:
        """The exit code claimed by the rank that failed; None if none has.

        Once known it is not asked for again: the store may have gone with its rank.
        """
        until = time.monotonic() + within_seconds
        while self._failure_code is None:
            if self._store.check([FAILURE]):
                self._failure_code = _code_in(self._store.get(FAILURE).decode())
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(0.1)
        return self._failure_code

    def acknowledge(self) -> None:
        """This rank knows of another's failure, and needs the store no more."""
        with self._failing, suppress(dist.DistError, RuntimeError):
            if not (self._has_acknowledged or self._has_claimed):
                self._store.add(ACKNOWLEDGED, 1)
                self._has_acknowledged = True

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
        late = [r for r, doing in others.items() if doing != self.doing] or list(others)
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
        lost_at_seconds: float | None = None
        while not self._is_leaving.wait(BEAT_SECONDS):
            self._ticks += 1
            now = time.monotonic()
            try:
                self._store.set(f"beat/{self._rank}", json.dumps([self._ticks, self.doing]))
                code = self.failure_code()
                lost_at_seconds = None
            except (dist.DistError, RuntimeError):  # the store has gone, and with it a rank
                code = self._failure_code
                lost_at_seconds = lost_at_seconds or now
            if code is not None:
                self.acknowledge()
                told_at_seconds = told_at_seconds or now
                if self._has_had_its_time(told_at_seconds):
                    _leave(code)
            elif lost_at_seconds is not None:
                if self._has_had_its_time(lost_at_seconds):
                    _leave(EXIT_FAULT)
            elif self._is_overdue(self.timeout_seconds + SILENCE_SECONDS):
                self._end_a_stuck_run()

    def _has_had_its_time(self, since_seconds: float) -> bool:
        """Whether this rank ought to have left by itself, a save and what follows it counted."""
        waited_seconds = time.monotonic() - since_seconds
        if self._is_saving:  # read first: a save that ends notes when before it is over
            return waited_seconds > SAVE_SECONDS
        after_save_seconds = time.monotonic() - self._saved_at_seconds
        return min(waited_seconds, after_save_seconds) > GRACE_SECONDS

    def _watch(self) -> None:
        """End a rank whose main thread hangs and whose store, which could tell why, hangs too."""
        patience_seconds = self.timeout_seconds + SILENCE_SECONDS + LAST_RESORT_SECONDS
        while not self._is_leaving.wait(BEAT_SECONDS):
            if self._is_overdue(patience_seconds):
                end_for_lack_of_answer(self._place, self.doing)

    def _is_overdue(self, patience_seconds: float) -> bool:
        if self._num_works:  # read first: a work that ends beats before it is no longer counted
            return False
        return time.monotonic() - self._beaten_at_seconds > patience_seconds

    def _end_a_stuck_run(self) -> None:
        """The main thread waits for a rank that does not come, where nothing else times out."""
        what = self.missing()
        if self.claim_failure(code=EXIT_FAULT):
            print(
                f"bertsmith: error: nothing has moved for {self.timeout_seconds:g} seconds at "
                f"{self.doing}: {what}",
                file=sys.stderr,
                flush=True,
            )
            with suppress(dist.DistError, RuntimeError):
                self.wait_for_the_others()
        self.acknowledge()
        _leave(self._failure_code or EXIT_FAULT)


class Pulse:
    """Another rank's heart, as one who waits for that rank hears it."""

    def __init__(self, store: Store, rank: int) -> None:
        """Nothing is heard yet; silence counts from now."""
        self._store, self._key = store, f"beat/{rank}"
        self._last = b""
        self._heard_at_seconds = self._asked_at_seconds = time.monotonic()

    def silent_seconds(self) -> float:
        """How long the heart has not beaten; the store is asked once a beat at most."""
        now = time.monotonic()
        if now - self._asked_at_seconds >= BEAT_SECONDS:
            self._asked_at_seconds = now
            found = self._store.get(self._key) if self._store.check([self._key]) else b""
            if found != self._last:
                self._last, self._heard_at_seconds = found, now
        return now - self._heard_at_seconds


def _code_in(claim: str) -> int:
    return int(claim.split()[1])


def _leave(code: int) -> None:
    """End the process though its main thread hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}" + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
