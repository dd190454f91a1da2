"""Ranks find those of their own start, and say once who is missing."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from bertsmith.errors import EXIT_USER_ERROR, UserError
from bertsmith.parallel import meeting
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.heart import ACKNOWLEDGED, FAILURE
from bertsmith.parallel.place import Place
from ranks import free_port, place_of


def at_the_same_time(*works: Callable[[], object]) -> list[object]:
    """What each gives or raises."""
    found: list[object] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def gathered(
    store: Store, *places: Place, join_seconds: float = 10.0, waits_seconds: float = 0.0
) -> list[object]:
    """What ranks agree on that come one after the other."""

    def come(number: int) -> str:
        time.sleep(number * waits_seconds)
        return meeting.gather(store, places[number], join_seconds=join_seconds)

    return at_the_same_time(*(lambda n=n: come(n) for n in range(len(places))))


def test_each_start_has_a_name_of_its_own_over_one_store() -> None:
    store = HashStore()
    starts = [
        gathered(store, *(place_of(r, 3) for r in order), waits_seconds=0.02)
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2))
    ]
    for names in starts:
        assert len(set(names)) == 1
    assert len({names[0] for names in starts}) == 3


def test_a_start_that_failed_leaves_the_next_one_alone() -> None:
    """As when torchrun restarts: rank 1 had come and died, and so had a whole group that failed."""
    store = HashStore()
    died = gathered(store, place_of(1), join_seconds=0.1)
    failed = gathered(store, place_of(0, 3), place_of(1, 3), join_seconds=0.2)
    assert [type(x) for x in (*died, *failed)].count(UserError) == 2
    names = gathered(store, place_of(1), place_of(0), waits_seconds=0.2)
    assert names[0] == names[1]
    assert not PrefixStore(str(names[0]), store).check([FAILURE])


@pytest.mark.parametrize("absent", [0, 1])
def test_one_rank_says_who_is_missing(absent: int, tmp_path: Path) -> None:
    here = [place_of(r, 4, has_agent=True) for r in range(4) if r != absent]
    ends = gathered(FileStore(str(tmp_path / "store"), -1), *here, join_seconds=0.5)
    errors = [end for end in ends if isinstance(end, UserError)]
    silent = [end for end in ends if isinstance(end, SystemExit)]
    assert len(errors) == 1
    assert f"of 4 ranks these are missing: {absent};" in str(errors[0])
    assert [end.code for end in silent] == [EXIT_USER_ERROR] * 2


def test_who_holds_the_store_stays_until_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 2.0)
    port = free_port()
    config = ParallelConfig(join_seconds=1.0)
    left: dict[int, float] = {}

    def come(rank: int) -> None:
        try:
            meeting.meet(place_of(rank, 3, port=port), config)
        finally:
            left[rank] = time.monotonic()

    first, second = at_the_same_time(lambda: come(0), lambda: come(1))
    assert sorted(type(end).__name__ for end in (first, second)) == ["SystemExit", "UserError"]
    assert left[0] - left[1] < 1.0  # it does not stay longer than it has to


@pytest.mark.parametrize("knows", [True, False])
def test_how_long_it_stays(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a rank that is slow to look has said it knows; for one that never does, the grace."""
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.8)
    store = HashStore()

    def sleepy_rank() -> None:
        hall = PrefixStore("job/hall", store)
        number = hall.add("come", 1)
        own = PrefixStore(hall.get(f"answer/{number}").decode(), store)
        own.add("joined", 1)
        own.get(FAILURE)
        time.sleep(0.3)
        own.add(ACKNOWLEDGED, int(knows))

    began = time.monotonic()
    found, _ = at_the_same_time(
        lambda: meeting.gather(store, place_of(0, 3), join_seconds=0.2), sleepy_rank
    )
    assert isinstance(found, UserError)
    lasted = time.monotonic() - began
    assert (0.45 < lasted < 0.9) if knows else (0.95 < lasted < 2.0)


def test_another_program_at_the_port_is_told_from_a_meeting_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It accepts connections and says nothing: torch's own client would wait for ever."""
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as another:
        place = place_of(1, port=another.getsockname()[1])
        config = ParallelConfig(join_seconds=1.0)
        with pytest.raises(UserError, match=r"rank 1 cannot reach rank 0 at .*does not answer as"):
            meeting.meet(place, config)
