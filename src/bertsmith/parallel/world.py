"""The processes of one run: what they add up, agree on and wait for.

A run of one process is a world of size 1 in which all of this costs nothing. Numbers are added
over gloo on the CPU whatever the device, so that asking never waits for a GPU.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from bertsmith.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.heart import (
    FAILURE,
    LAST_RESORT_SECONDS,
    Heart,
    connection,
    end_for_lack_of_answer,
)
from bertsmith.parallel.place import Place, place_from

POLL_SECONDS = 0.05
LAST_WORD_SECONDS = 1.0

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Sums:
    """Numbers on their way through all ranks."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        """`work` is the all-reduce under way; None for a world of one."""
        self._values, self._work = values, work

    def wait(self) -> list[float]:
        """The sums over all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values: list[float] = self._values.tolist()
        return values


class World:
    """The ranks of a run, seen from one of them."""

    def __init__(
        self, place: Place | None = None, store: Store | None = None, heart: Heart | None = None
    ) -> None:
        """A world of one, unless all three are given."""
        self.rank = 0 if place is None else place.rank
        self.size = 1 if place is None else place.size
        self.local_rank = 0 if place is None else place.local_rank
        self._store, self._heart = store, heart
        self._num_asked = 0

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def begin_sums(self, values: Sequence[float]) -> Sums:
        """Start to add up numbers over the ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return Sums(tensor, None)
        return Sums(tensor, dist.all_reduce(tensor, async_op=True))

    def sums(self, values: Sequence[float]) -> list[float]:
        """Numbers added up over the ranks, in float64."""
        return self.begin_sums(values).wait()

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A CPU tensor added up over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def beat(self, doing: str) -> None:
        """Say that this rank is at work, and at what: "step 12"."""
        if self._heart is not None:
            self._heart.beat(doing)

    def on_main(self, do: Callable[[], Answer]) -> Answer:
        """Let rank 0 do something while the others wait; its answer, or its UserError, is for all.

        The others wait on the store and not in a collective, so that it may take any time. Every
        rank has to come to the same calls in the same order.

        Args:
            do: Its answer is a value that JSON has.
        """
        if self.size == 1:
            return do()
        assert self._store is not None
        self._num_asked += 1
        name = f"answer/{self._num_asked}"
        if self.is_main:
            try:
                answer = do()
            except UserError as error:
                self._store.set(name, json.dumps({"error": str(error)}))
                raise
            self._store.set(name, json.dumps({"answer": answer}))
            return answer
        reply = json.loads(self._await(name))
        if "error" in reply:
            raise UserError(reply["error"])
        found: Answer = reply["answer"]
        return found

    def main_first(self, do: Callable[[], Answer]) -> Answer:
        """Every rank's own answer, rank 0's first: it checks or notes for the others."""
        if self.is_main:
            answer = do()
            self.on_main(lambda: True)
            return answer
        self.on_main(lambda: True)
        return do()

    def check_same(self, what: str, facts: Mapping[str, str]) -> None:
        """Refuse to go on if a rank has other facts than rank 0.

        Args:
            what: What they are about, new each time, for the message.
            facts: By name.

        Raises:
            UserError: On every rank, naming the first difference.
        """
        if self.size == 1:
            return
        assert self._store is not None
        self._store.set(f"{what}/{self.rank}", json.dumps(dict(facts)))
        self.on_main(lambda: self._differs(what, facts))

    def _differs(self, what: str, mine: Mapping[str, str]) -> bool:
        """False, once every rank's facts have been seen to be rank 0's."""
        assert self._store is not None
        for rank in range(1, self.size):
            theirs = json.loads(self._await(f"{what}/{rank}"))
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    raise UserError(
                        f"ranks differ in {what}: {name} is {mine.get(name)} on rank 0 and "
                        f"{theirs.get(name)} on rank {rank}; start every rank from the same"
                    )
        return False

    def _await(self, name: str) -> str:
        """The text that another rank stores under a name, whenever it does."""
        assert self._store is not None
        while not self._store.check([name]):
            self.beat("waiting for another rank")
            time.sleep(POLL_SECONDS)
            if self._store.check([FAILURE]):
                raise OtherRankFailedError
        value: bytes = self._store.get(name)
        return value.decode()


def dealt(items: Sequence[Item], world: World) -> Iterator[tuple[int | None, Item]]:
    """A rank's items with their numbers: every size-th, as many on every rank.

    Who would have one fewer does the first item once more, under no number, so that its result is
    left out: under fsdp every rank has to take part in every pass.
    """
    for first in range(0, len(items), world.size):
        number = first + world.rank
        if number < len(items):
            yield number, items[number]
        else:
            yield None, items[0]


class OtherRankFailedError(Exception):
    """This rank has to end because another one did, which says why."""


@contextmanager
def joined(config: ParallelConfig, *, on_gpus: bool, facts: Mapping[str, str]) -> Iterator[World]:
    """Within the block this process is one of its run's ranks.

    A process that neither torchrun nor srun has started is a world of its own. When a rank fails,
    all of them end, with one message in all and the same exit code.

    Args:
        config: Timeouts.
        on_gpus: Whether each rank trains on a GPU of its own; a CPU run needs none that is there.
        facts: What has to be the same on every rank: versions, code, settings.

    Raises:
        UserError: The ranks do not find each other, or differ.
        SystemExit: This or another rank has failed, and the message has been given.
    """
    try:
        place = place_from(os.environ)
    except ValueError as error:
        raise UserError(f"cannot join the other ranks: {error}") from error
    if place is None or place.size == 1:
        yield World()
        return
    store = _meet(place, config)
    heart = Heart(
        PrefixStore(
            place.generation, connection(place.host, place.port, seconds=config.join_seconds)
        ),
        rank=place.rank,
        size=place.size,
        timeout_seconds=config.timeout_seconds,
    )
    heart.start()
    try:
        if on_gpus:
            torch.cuda.set_device(place.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
        world = World(place, store, heart)
        world.check_same("code and settings", facts)
        yield world
        world.beat("the end")
        dist.barrier()
    except BaseException as error:  # whatever ends one rank has to end all
        raise SystemExit(_end(error, place, heart, config)) from None
    finally:
        heart.stop()
        with suppress(Exception):
            dist.destroy_process_group()


def _meet(place: Place, config: ParallelConfig) -> Store:
    """Wait until every rank has come to the store.

    Raises:
        UserError: It cannot be reached or opened, or ranks are missing.
    """
    serves = place.rank == 0 and not place.has_agent
    where = f"{place.host}:{place.port}"
    try:
        tcp = TCPStore(
            place.host,
            place.port,
            is_master=serves,
            timeout=timedelta(seconds=config.join_seconds),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        if serves:
            raise UserError(
                f"rank 0 cannot listen at {where} ({_first_line(error)}); is the port in use, or "
                "MASTER_ADDR not an address of this machine?"
            ) from error
        raise UserError(
            f"rank {place.rank} cannot reach rank 0 at {where} within {config.join_seconds:g} "
            f"seconds ({_first_line(error)}); check MASTER_ADDR and MASTER_PORT, the firewall, and "
            "GLOO_SOCKET_IFNAME"
        ) from error
    store = PrefixStore(place.generation, tcp)
    try:
        _wait_for_all(store, place, config)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"rank {place.rank} has lost rank 0, which held the meeting point at {where} "
            f"({_first_line(error)})"
        ) from error
    return store


def _wait_for_all(store: Store, place: Place, config: ParallelConfig) -> None:
    """Return once every rank has come; one rank says which have not, the others just end."""
    where = f"{place.host}:{place.port}"
    store.set(f"joined/{place.rank}", "")
    until = time.monotonic() + config.join_seconds
    come = store.add("joined", 1)
    while come < place.size:
        if store.check([FAILURE]):
            raise SystemExit(EXIT_USER_ERROR)
        if time.monotonic() > until:
            claim = f"{place.rank} {EXIT_USER_ERROR}"
            if store.compare_set(FAILURE, "", claim).decode() != claim:
                raise SystemExit(EXIT_USER_ERROR)
            time.sleep(LAST_WORD_SECONDS)  # the store must live until all have seen the claim
            missing = [r for r in range(place.size) if not store.check([f"joined/{r}"])]
            shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise UserError(
                f"rank {place.rank} has waited {config.join_seconds:g} seconds at {where}, and of "
                f"{place.size} ranks these are missing: {shown}; is every node started, with the "
                "same MASTER_ADDR and world size?"
            )
        time.sleep(POLL_SECONDS)
        come = store.add("joined", 0)


def _end(error: BaseException, place: Place, heart: Heart, config: ParallelConfig) -> int:
    """Say once what ended the run; the exit code."""
    last_resort = threading.Timer(
        LAST_RESORT_SECONDS, end_for_lack_of_answer, (place.rank, "its end")
    )
    last_resort.daemon = True
    last_resort.start()
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends ranks that are left
    try:
        code = None
        if isinstance(error, OtherRankFailedError) or _is_of_the_network(error):
            code = heart.failure_code(within_seconds=3.0)
        if code is not None:
            heart.acknowledge()
            return code
        code = _code_of(error)
        lost = heart.missing() if _is_of_the_network(error) else None
        if not heart.claim_failure(code=code):
            heart.acknowledge()
            return heart.failure_code() or code
    except (dist.DistError, RuntimeError):  # the store has gone with the rank that held it
        print(
            f"bertsmith: error: rank {place.rank} has lost rank 0, which held the meeting point "
            f"at {place.host}:{place.port} ({_first_line(error)})",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_FAULT
    of_rank = f"rank {place.rank}: " if place.rank else ""
    if lost is not None:
        print(
            f"bertsmith: error: {lost}; rank {place.rank} waited up to "
            f"{config.timeout_seconds:g} seconds for it",
            file=sys.stderr,
        )
    elif isinstance(error, UserError):
        print(f"bertsmith: error: {of_rank}{error}", file=sys.stderr)
    elif not isinstance(error, (SystemExit, KeyboardInterrupt)):
        text = "".join(traceback.format_exception(error))
        print(f"bertsmith: rank {place.rank} failed:\n{text}", file=sys.stderr)
    sys.stderr.flush()
    with suppress(dist.DistError, RuntimeError):
        heart.wait_for_the_others()
    return code


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


def _is_of_the_network(error: BaseException) -> bool:
    """Whether a collective failed: another rank is to blame, not this one."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
