"""How ranks find each other: all come to one store, and those that came first wait.

torchrun may start ranks anew over a store that lives on, with the old group's keys in it. Nothing
that it tells a process differs between two starts and is the same on every node: each node's agent
counts the restarts it has made itself. So rank 0 names the group, new at each start, and tells the
name to each rank that comes.
"""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from bertsmith.errors import EXIT_USER_ERROR, UserError
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.ending import first_line
from bertsmith.parallel.heart import ACKNOWLEDGED, FAILURE, GRACE_SECONDS
from bertsmith.parallel.place import Place

POLL_SECONDS = 0.05


def meet(place: Place, config: ParallelConfig) -> tuple[Store, str]:
    """Wait until every rank has come.

    Returns:
        The group's part of the store, and the prefix of its keys.

    Raises:
        UserError: The store cannot be reached or opened, or ranks are missing.
    """
    where = f"{place.host}:{place.port}"
    try:
        store = connect(place, seconds=config.join_seconds, serves=_serves(place))
    except (dist.DistError, RuntimeError, ValueError) as error:
        if _serves(place):
            raise UserError(
                f"rank 0 cannot listen at {where} ({first_line(error)}); is the port in use, or "
                "MASTER_ADDR not an address of this machine?"
            ) from error
        raise UserError(
            f"rank {place.rank} cannot reach rank 0 at {where} within {config.join_seconds:g} "
            f"seconds ({first_line(error)}); check MASTER_ADDR and MASTER_PORT, the firewall, and "
            "GLOO_SOCKET_IFNAME"
        ) from error
    try:
        generation = gather(store, place, join_seconds=config.join_seconds)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"rank {place.rank} has lost rank 0, which held the meeting point at {where} "
            f"({first_line(error)})"
        ) from error
    return PrefixStore(generation, store), generation


def connect(place: Place, *, seconds: float, serves: bool = False) -> Store:
    """A connection to the meeting point, which an agent serves, or rank 0.

    Args:
        place: Says where it is.
        seconds: For this and every later question.
        serves: Whether this process opens it.

    Raises:
        DistError: It cannot be reached or opened in time.
    """
    opened: Future[Store] = Future()

    def open_it() -> None:
        try:
            opened.set_result(
                TCPStore(
                    place.host,
                    place.port,
                    is_master=serves,
                    timeout=timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            )
        except Exception as error:
            opened.set_exception(error)

    # In a thread, since torch's client has no limit for the first answer: where another program
    # listens at the port, it waits for ever (torch 2.13).
    threading.Thread(target=open_it, name="connecting", daemon=True).start()
    try:
        return opened.result(timeout=seconds + GRACE_SECONDS)
    except TimeoutError as error:
        raise dist.DistError(
            "something listens there, but does not answer as a meeting point does"
        ) from error


def gather(store: Store, place: Place, *, join_seconds: float) -> str:
    """Come to the store and wait until all ranks of the same start have.

    Returns:
        Prefix of the keys that this start's ranks use, and no other's.

    Raises:
        UserError: Ranks are missing; raised on one rank.
        SystemExit: Ranks are missing, and another rank says so.
    """
    hall = PrefixStore(f"{place.run_id}/hall", store)
    until = time.monotonic() + join_seconds
    number = hall.add("come", 1)  # counts on over all starts, so that no answer is an old one
    if place.rank:
        generation = _told_by_rank_0(hall, number, place, until, join_seconds)
        _wait_for_all(PrefixStore(generation, store), place, until, join_seconds, lambda: None)
        return generation
    generation = f"{place.run_id}/{uuid.uuid4().hex}"
    num_told = 0

    def tell() -> None:
        nonlocal num_told
        while num_told < hall.add("come", 0):
            num_told += 1
            hall.set(f"answer/{num_told}", generation)

    _wait_for_all(PrefixStore(generation, store), place, until, join_seconds, tell)
    return generation


def _told_by_rank_0(
    hall: Store, number: int, place: Place, until: float, join_seconds: float
) -> str:
    """The name of the group, as rank 0 tells it to the rank that came as so many-eth."""
    while not hall.check([f"answer/{number}"]):
        if time.monotonic() > until:
            # Whoever speaks first does so for all that have come.
            claim = f"rank 0 missing/{hall.add('come', 0)}"
            if hall.compare_set(claim, "", str(place.rank)).decode() != str(place.rank):
                raise SystemExit(EXIT_USER_ERROR)
            raise _missing_error(place, [0], join_seconds)
        time.sleep(POLL_SECONDS)
    return hall.get(f"answer/{number}").decode()


def _wait_for_all(
    store: Store, place: Place, until: float, join_seconds: float, meanwhile: Callable[[], None]
) -> None:
    """Return once every rank has come; one rank says which have not, the others just end."""
    store.set(f"joined/{place.rank}", "")
    store.add("joined", 1)
    meanwhile()
    while store.add("joined", 0) < place.size:
        if store.check([FAILURE]):
            _let_all_know(store, place)
            raise SystemExit(EXIT_USER_ERROR)
        if time.monotonic() > until:
            claim = f"{place.rank} {EXIT_USER_ERROR}"
            speaks = store.compare_set(FAILURE, "", claim).decode() == claim
            missing = [r for r in range(place.size) if not store.check([f"joined/{r}"])]
            _let_all_know(store, place)
            if not speaks:
                raise SystemExit(EXIT_USER_ERROR)
            raise _missing_error(place, missing, join_seconds)
        time.sleep(POLL_SECONDS)
        meanwhile()


def _let_all_know(store: Store, place: Place) -> None:
    """Acknowledge a failure; who holds the store stays until all that have come did so."""
    store.add(ACKNOWLEDGED, 1)
    until = time.monotonic() + GRACE_SECONDS
    while _serves(place) and time.monotonic() < until:
        if store.add(ACKNOWLEDGED, 0) >= store.add("joined", 0):
            break
        time.sleep(POLL_SECONDS)


def _serves(place: Place) -> bool:
    """Whether this process holds the meeting point."""
    return place.rank == 0 and not place.has_agent


def _missing_error(place: Place, missing: list[int], join_seconds: float) -> UserError:
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return UserError(
        f"rank {place.rank} has waited {join_seconds:g} seconds at {place.host}:{place.port}, and "
        f"of {place.size} ranks these are missing: {shown}; is every node started, with the same "
        "MASTER_ADDR and world size?"
    )
