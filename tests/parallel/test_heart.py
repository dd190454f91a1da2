"""Who is alive, who may take its time, and who says why a run ends."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from bertsmith.errors import EXIT_FAULT, EXIT_USER_ERROR, UserError
from bertsmith.parallel import ending
from bertsmith.parallel import heart as heart_module
from bertsmith.parallel import world as world_module
from bertsmith.parallel.ending import end
from bertsmith.parallel.heart import (
    ACKNOWLEDGED,
    FAILURE,
    Heart,
    OtherRankFailedError,
    SilentRankError,
)
from bertsmith.parallel.place import Place
from bertsmith.parallel.world import World
from ranks import place_of

BEAT_SECONDS, GRACE_SECONDS, SILENCE_SECONDS = 0.02, 0.4, 0.1


@pytest.fixture(autouse=True)
def _time_flies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heart_module, "BEAT_SECONDS", BEAT_SECONDS)
    monkeypatch.setattr(heart_module, "GRACE_SECONDS", GRACE_SECONDS)
    monkeypatch.setattr(heart_module, "SILENCE_SECONDS", SILENCE_SECONDS)
    monkeypatch.setattr(heart_module, "LAST_RESORT_SECONDS", 0.2)
    monkeypatch.setattr(world_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ending, "WORD_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGTERM)  # who ends ignores it
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which hearts ended this process, which lives on."""
    codes: list[int] = []
    monkeypatch.setattr(heart_module, "_leave", codes.append)
    monkeypatch.setattr(
        heart_module, "end_for_lack_of_answer", lambda place, doing: codes.append(EXIT_FAULT)
    )
    return codes


def heart_of(store: Store, rank: int, *, timeout_seconds: float = 0.3) -> Heart:
    return Heart(store, place_of(rank), timeout_seconds=timeout_seconds)


@contextmanager
def beating(heart: Heart) -> Iterator[Heart]:
    heart.start()
    try:
        yield heart
    finally:
        heart.stop()


def in_background(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def test_a_rank_waits_for_one_that_is_at_work_as_long_as_it_takes(ended: list[int]) -> None:
    store = HashStore()
    with beating(heart_of(store, 0)) as first, beating(heart_of(store, 1)) as second:
        main, other = World(place_of(0), store, first), World(place_of(1), store, second)

        def slow() -> str:
            time.sleep(1.2)  # timeout and last resort are 0.6 s together
            return "done"

        other.beat("the checkpoint of step 4")
        working = in_background(lambda: main.on_main(slow))
        assert other.on_main(lambda: "not asked") == "done"
        working.join()
        assert second.doing == "the checkpoint of step 4"  # no longer the wait
    assert ended == []


def test_work_of_each_rank_suspends_its_deadline_and_no_more(ended: list[int]) -> None:
    with beating(heart_of(HashStore(), 0)) as heart:
        world = World(place_of(0), HashStore(), heart)
        with world.working("the reading of data"):
            time.sleep(1.0)
        assert ended == []
        time.sleep(0.25)  # the deadline counts from the end of the work
        assert ended == []
        time.sleep(1.0)
    assert ended


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_rank_does_not_wait_for_a_dead_one(
    has_begun: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    if has_begun:
        store.set("beat/0", json.dumps([7, "the checkpoint of step 4"]))
    with beating(heart_of(store, 1)) as heart:
        world = World(place_of(1), store, heart)
        began = time.monotonic()
        with pytest.raises(SilentRankError) as found:
            world.on_main(lambda: True)
        assert 0.3 <= time.monotonic() - began < 30.0
        assert end(found.value, place_of(1), heart) == EXIT_FAULT
    said = capfd.readouterr().err
    assert said.count("bertsmith: error:") == 1
    assert ("rank 0 stopped answering, last seen at the checkpoint of step 4" in said) == has_begun
    assert ("rank 0 never began" in said) != has_begun
    assert "rank 1 waited 0.3 seconds" in said


def test_a_dead_rank_is_not_waited_for_as_long_as_a_step_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heart_module, "GONE_SECONDS", 0.3)
    store = HashStore()
    heart = heart_of(store, 0, timeout_seconds=600.0)
    with beating(heart), pytest.raises(SilentRankError):
        World(place_of(0), store, heart).check_same("data", {"fingerprint": "a"})


def test_rank_0_does_not_wait_for_dead_facts() -> None:
    store = HashStore()
    with beating(heart_of(store, 0)) as heart, pytest.raises(SilentRankError):
        World(place_of(0), store, heart).check_same("data", {"fingerprint": "a"})


def test_a_rank_that_waits_leaves_when_another_has_failed() -> None:
    store = HashStore()
    heart = heart_of(store, 1, timeout_seconds=60.0)
    heart_of(store, 0).claim_failure(code=EXIT_USER_ERROR)
    with pytest.raises(OtherRankFailedError):
        World(place_of(1), store, heart).on_main(lambda: True)


def test_the_first_code_stands(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    first, second = heart_of(store, 0), heart_of(store, 1)
    assert first.claim_failure(code=EXIT_USER_ERROR)
    assert not first.claim_failure(code=EXIT_USER_ERROR)  # its other thread: one voice is enough
    assert not second.claim_failure(code=EXIT_FAULT)
    assert end(ValueError("later"), place_of(1), second) == EXIT_USER_ERROR
    assert capfd.readouterr().err == ""


def test_who_is_told_acknowledges_at_once_and_once(ended: list[int]) -> None:
    store = HashStore()
    claimer = heart_of(store, 0)
    with beating(heart_of(store, 1)) as told:
        claimer.claim_failure(code=EXIT_USER_ERROR)
        time.sleep(GRACE_SECONDS / 4)
        assert store.add(ACKNOWLEDGED, 0) == 1
        assert ended == []
        assert end(OtherRankFailedError(), place_of(1), told) == EXIT_USER_ERROR
        assert store.add(ACKNOWLEDGED, 0) == 1


class Flaky:
    """A store that can go away."""

    def __init__(self) -> None:
        self._store, self.is_gone = HashStore(), False

    def __getattr__(self, name: str) -> object:
        if self.is_gone:
            raise dist.DistStoreError("gone")
        return getattr(self._store, name)


def test_a_failure_told_before_the_store_went_keeps_its_code(
    ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    store = Flaky()
    heart = heart_of(cast(Store, store), 1)
    with beating(heart):
        store.set(FAILURE, f"0 {EXIT_USER_ERROR}")  # type: ignore[operator]
        time.sleep(5 * BEAT_SECONDS)
        store.is_gone = True
        assert end(dist.DistNetworkError("gone"), place_of(1), heart) == EXIT_USER_ERROR
        time.sleep(GRACE_SECONDS + 5 * BEAT_SECONDS)
    assert set(ended) == {EXIT_USER_ERROR}
    assert capfd.readouterr().err == ""


def test_a_store_that_comes_back_is_forgiven(ended: list[int]) -> None:
    store = Flaky()
    with beating(heart_of(cast(Store, store), 1, timeout_seconds=60.0)):
        for _ in range(2):  # each time for less than the grace, together for more
            store.is_gone = True
            time.sleep(0.6 * GRACE_SECONDS)
            store.is_gone = False
            time.sleep(5 * BEAT_SECONDS)
        assert ended == []
        store.is_gone = True
        time.sleep(GRACE_SECONDS + 5 * BEAT_SECONDS)
    assert set(ended) == {EXIT_FAULT}


def test_a_save_ends_before_another_ranks_failure_ends_its_rank(ended: list[int]) -> None:
    """And what follows a save has the time that a rank without one has."""
    store = HashStore()
    with beating(heart_of(store, 0, timeout_seconds=60.0)) as heart:
        world = World(place_of(0), store, heart)
        with world.saving():
            heart_of(store, 1).claim_failure(code=EXIT_USER_ERROR)
            time.sleep(GRACE_SECONDS + 10 * BEAT_SECONDS)
            assert ended == []
        time.sleep(GRACE_SECONDS / 2)
        assert ended == []
        time.sleep(GRACE_SECONDS)
    assert set(ended) == {EXIT_USER_ERROR}


def test_a_save_that_does_not_end_is_not_waited_for_without_limit(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heart_module, "SAVE_SECONDS", 2 * GRACE_SECONDS)
    store = HashStore()
    with beating(heart_of(store, 0, timeout_seconds=60.0)) as heart, heart.saving():
        heart_of(store, 1).claim_failure(code=EXIT_USER_ERROR)
        time.sleep(2 * GRACE_SECONDS + 10 * BEAT_SECONDS)
        assert set(ended) == {EXIT_USER_ERROR}


def test_a_save_outlives_the_store(ended: list[int]) -> None:
    """The rank that held it is gone, whether another failed is not known."""
    store = Flaky()
    with beating(heart_of(cast(Store, store), 0, timeout_seconds=60.0)) as heart, heart.saving():
        store.is_gone = True
        time.sleep(GRACE_SECONDS + 10 * BEAT_SECONDS)
        assert ended == []


def test_an_end_that_went_well_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LAST_RESORT_SECONDS", 5.0)
    heart = heart_of(HashStore(), 0)
    assert end(UserError("wrong"), place_of(0), heart) == EXIT_USER_ERROR
    timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_wait_without_a_limit_has_a_last_resort(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's client may wait for ever, and then no other line of ours runs."""
    ended_at = list[str]()
    gone = threading.Event()

    def end_here(place: Place, doing: str) -> None:
        ended_at.append(doing)
        gone.set()

    monkeypatch.setattr(ending, "end_for_lack_of_answer", end_here)
    with ending.last_resort(place_of(1), "the meeting", after_seconds=0.1 if hangs else 60.0):
        assert gone.wait(30.0 if hangs else 0.0) is hangs
    assert ended_at == (["the meeting"] if hangs else [])


@pytest.mark.parametrize("hangs", [True, False])
def test_a_group_that_does_not_let_go_ends_with_its_process(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    ended_with: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", let_go.wait if hangs else let_go.set)
    monkeypatch.setattr(ending, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr("os._exit", ended_with.append)
    ending.leave_group(EXIT_USER_ERROR)
    assert ended_with == ([EXIT_USER_ERROR] if hangs else [])
    let_go.set()
