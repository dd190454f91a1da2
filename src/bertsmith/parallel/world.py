"""The processes of one run: what they add up, agree on and wait for.

A run of one process is a world of size 1 in which all of this costs nothing. Numbers are added
over gloo on the CPU whatever the device, so that asking never waits for a GPU.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from bertsmith.errors import UserError
from bertsmith.parallel import last_word
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.ending import end, last_resort, leave_group
from bertsmith.parallel.heart import (
    FAILURE,
    LAST_RESORT_SECONDS,
    Heart,
    OtherRankFailedError,
    Pulse,
    SilentRankError,
)
from bertsmith.parallel.meeting import connect, meet
from bertsmith.parallel.place import Place, place_from

POLL_SECONDS = 0.05

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
        self.local_size = 1 if place is None else place.local_size
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

    def largest(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' numbers."""
        return -self.largest(-value)

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A CPU tensor added up over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def beat(self, doing: str) -> None:
        """Say that this rank is at work, and at what: "step 12"."""
        if self._heart is not None:
            self._heart.beat(doing)

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """Within the block this rank is at work by itself, and may take any time.

        Around what takes longer the more data there is, and never around what waits for other
        ranks: nobody would end a wait in vain.

        Args:
            doing: As in `beat`.
        """
        self.beat(doing)
        with self._at_work():
            yield

    def _at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self._heart is None else self._heart.at_work()

    def saving(self) -> AbstractContextManager[None]:
        """Within the block, in any one thread, another rank's failure does not end this process."""
        return nullcontext() if self._heart is None else self._heart.saving()

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
                with self._at_work():
                    answer = do()
            except UserError as error:
                self._store.set(name, json.dumps({"error": str(error)}))
                raise
            self._store.set(name, json.dumps({"answer": answer}))
            return answer
        reply = json.loads(self._await(name, rank=0))
        if "error" in reply:
            raise UserError(reply["error"])
        found: Answer = reply["answer"]
        return found

    def main_first(self, do: Callable[[], Answer]) -> Answer:
        """Every rank's own answer, rank 0's first: it checks or notes for the others."""
        if self.is_main:
            with self._at_work():
                answer = do()
            self.on_main(lambda: True)
            return answer
        self.on_main(lambda: True)
        with self._at_work():
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
            theirs = json.loads(self._await(f"{what}/{rank}", rank=rank))
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    raise UserError(
                        f"ranks differ in {what}: {name} is {mine.get(name)} on rank 0 and "
                        f"{theirs.get(name)} on rank {rank}; start every rank from the same"
                    )
        return False

    def _await(self, name: str, *, rank: int) -> str:
        """The text that a rank stores under a name, whenever it does, as long as its heart beats.

        Raises:
            SilentRankError: It is dead or stopped.
            OtherRankFailedError: Some rank has failed.
        """
        assert self._store is not None
        assert self._heart is not None
        pulse, doing = Pulse(self._store, rank), self._heart.doing
        while not self._store.check([name]):
            self.beat(f"the wait for rank {rank}")
            time.sleep(POLL_SECONDS)
            if self._store.check([FAILURE]):
                raise OtherRankFailedError
            if pulse.silent_seconds() > self._heart.silence_limit_seconds:
                raise SilentRankError(f"rank {rank} is silent")
        self.beat(doing)
        value: bytes = self._store.get(name)
        return value.decode()


class AbandonedError(Exception):
    """All ranks have left off in the middle of something, because one of them was told to stop."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


def dealt(
    items: Sequence[Item], world: World, *, stop_asked: Callable[[], bool] = never
) -> Iterator[tuple[int | None, Item]]:
    """A rank's items with their numbers: every size-th, as many on every rank.

    Who would have one fewer does the first item once more, under no number, so that its result is
    left out: under fsdp every rank has to take part in every pass.

    Args:
        items: The same on every rank.
        world: The ranks.
        stop_asked: Whether this rank was told to stop, asked before each item.

    Raises:
        AbandonedError: A rank was told to stop.
    """
    for first in range(0, len(items), world.size):
        if world.sums([stop_asked()])[0]:
            raise AbandonedError
        number = first + world.rank
        if number < len(items):
            yield number, items[number]
        else:
            yield None, items[0]


def _meeting_seconds(config: ParallelConfig) -> float:
    """By when a rank has met the others or said why not: each of three waits has its own limit.

    They are the first connection, the others' coming, and the heart's connection.
    """
    return 3 * config.join_seconds + LAST_RESORT_SECONDS


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
    if on_gpus:
        place = place.seeing(torch.cuda.device_count())
    with last_resort(place, "the meeting of ranks", after_seconds=_meeting_seconds(config)):
        store, generation = meet(place, config)
        heart = Heart(
            PrefixStore(generation, connect(place, seconds=config.join_seconds)),
            place,
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
        code = end(error, place, heart)
        last_word.leave(code)
        raise SystemExit(code) from error
    else:
        leave_group()
    finally:
        heart.stop()
