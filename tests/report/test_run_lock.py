"""The lock of a run folder: refused, taken over, raced for, lost, on any disk."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.report import run_lock
from bertsmith.report.run_folder import check_run_folder, open_run_folder
from bertsmith.report.run_lock import (
    LOCK_FILE,
    TAKEOVER_FILE,
    Holder,
    LostLockError,
    hold_run_lock,
    lock_text,
    this_process,
)

HOLDS = """
import sys, time
from pathlib import Path
from bertsmith.errors import UserError
from bertsmith.report.run_lock import hold_run_lock
folder, seconds, stale = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
try:
    with hold_run_lock(folder, print, stale_seconds=stale, renew_seconds=0.1):
        print("HELD", flush=True)
        time.sleep(seconds)
except UserError as error:
    print("REFUSED", error, flush=True)
"""


def start_holder(
    folder: Path, *, seconds: float, stale_seconds: float = 1.0
) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), str(seconds), str(stale_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def quick(folder: Path, lines: list[str] | None = None, **values: Any) -> Any:
    said = [] if lines is None else lines
    return hold_run_lock(
        folder, said.append, **({"stale_seconds": 0.6, "renew_seconds": 0.05} | values)
    )


def leave(folder: Path, holder: Holder) -> None:
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_bytes(lock_text(holder))


@contextmanager
def moving(path: Path) -> Iterator[None]:
    """Somebody elsewhere moves the counter of a lock on."""
    ends = threading.Event()

    def work() -> None:
        count = 0
        while not ends.wait(0.05):
            count += 1
            content = path.read_bytes()
            path.write_bytes(content.replace(content[13:24], b"%011d" % count, 1))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_the_second_run_is_refused_with_process_host_and_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with quick(folder):
        ours = json.loads((folder / LOCK_FILE).read_text())
        assert ours["pid"] == os.getpid()
        with pytest.raises(UserError) as caught, quick(folder):
            pass
        message = str(caught.value)
        assert "\n" not in message
        for part in (f"process {os.getpid()} on {ours['host']}", ours["since"], "kill", "--output"):
            assert part in message
        assert json.loads((folder / LOCK_FILE).read_text())["token"] == ours["token"]
    (folder.parent / "other").mkdir()
    with quick(folder), quick(folder.parent / "other"):
        pass  # each folder has its own


def test_a_lock_is_gone_after_its_run_and_so_is_a_folder_made_for_it(tmp_path: Path) -> None:
    with quick(tmp_path / "run"):
        assert [p.name for p in (tmp_path / "run").iterdir()] == [LOCK_FILE]
    assert list(tmp_path.iterdir()) == []

    def fail() -> None:
        (tmp_path / "run" / "log.txt").touch()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), quick(tmp_path / "run"):
        fail()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["log.txt"]


def test_it_works_outside_the_main_thread(tmp_path: Path) -> None:
    held: list[bool] = []

    def work() -> None:
        with quick(tmp_path / "run"):
            held.append((tmp_path / "run" / LOCK_FILE).exists())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert held == [True]


def test_a_killed_run_of_this_machine_is_seen_at_once(tmp_path: Path) -> None:
    process = start_holder(tmp_path, seconds=60.0)
    go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "HELD\n"
    process.kill()
    while (tmp_path / LOCK_FILE).exists() and not is_dead(process.pid):
        time.sleep(0.01)
    lines: list[str] = []
    began = time.monotonic()
    with quick(tmp_path, lines, stale_seconds=30.0):  # not reaped yet: a zombie holds no lock
        assert time.monotonic() - began < 20.0
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    process.communicate()
    assert len(lines) == 1
    assert f"left behind by process {process.pid} on" in lines[0]
    assert "gone; taken over" in lines[0]
    assert list(tmp_path.iterdir()) == []


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        time.sleep(1.0)  # no /proc: it was sent SIGKILL
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="starts are read from /proc")
def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    us = this_process()
    assert us.started_ticks is not None
    leave(tmp_path, replace(us, started_ticks=us.started_ticks - 1, token="old"))
    lines: list[str] = []
    with quick(tmp_path, lines, stale_seconds=30.0):
        pass
    assert "gone; taken over" in lines[0]
    leave(tmp_path, replace(us, token="old"))
    with pytest.raises(UserError, match="another run is at work"), quick(tmp_path):
        pass


ELSEWHERE = [
    {"host": "other"},
    {"boot_id": "other"},
    {"pid_namespace": "pid:[1]"},
]


@pytest.mark.parametrize("where", ELSEWHERE, ids=lambda where: next(iter(where)))
def test_a_lock_from_elsewhere_holds_while_it_moves(tmp_path: Path, where: dict[str, str]) -> None:
    # The process number is of nobody here, and says nothing about elsewhere.
    leave(tmp_path, replace(this_process(), pid=2**31 - 1, token="theirs", **where))  # type: ignore[arg-type]
    lines: list[str] = []
    with (
        moving(tmp_path / LOCK_FILE),
        pytest.raises(UserError, match="process 2147483647 on"),
        quick(tmp_path, lines, stale_seconds=30.0),
    ):
        pass
    assert "watching" in lines[0]
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == "theirs"


@pytest.mark.parametrize("where", ELSEWHERE, ids=lambda where: next(iter(where)))
def test_a_lock_from_elsewhere_that_does_not_move_is_taken_over(
    tmp_path: Path, where: dict[str, str]
) -> None:
    leave(tmp_path, replace(this_process(), token="theirs", **where))  # type: ignore[arg-type]
    lines: list[str] = []
    began = time.monotonic()
    with quick(tmp_path, lines, stale_seconds=0.5):
        assert time.monotonic() - began >= 0.5
        assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] != "theirs"
    assert "has not moved for 0.5 s; taken over" in lines[-1]


DAMAGED = [
    b"",
    b"{",
    b"[" * 20_000,
    b'{"pid": 1}',
    b"\xff\x00",
    lock_text(this_process()).replace(b'"pid": ', b'"pid": -'),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_lock_is_of_somebody_unknown_and_is_watched(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    lines: list[str] = []
    with quick(tmp_path, lines, stale_seconds=0.3):
        pass
    assert "unknown process (damaged)" in lines[0]
    assert "taken over" in lines[-1]


@pytest.mark.parametrize("content", [b"", b"\x00" * 300], ids=["empty", "zeros"])
def test_what_a_power_cut_leaves_of_a_lock_holds_up_nobody_for_long(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    began = time.monotonic()
    with hold_run_lock(tmp_path, print):
        assert time.monotonic() - began < 20.0  # STALE_SECONDS are 30


def test_a_lock_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a power cut leaves all of it or none."""
    calls: list[str] = []
    link = os.link

    def flushed(path: Path) -> None:
        calls.append(f"flush {path.stat().st_size}")

    def linked(fresh: Path, path: Path) -> None:
        calls.append(f"link {Path(fresh).stat().st_size}")
        link(fresh, path)

    monkeypatch.setattr(run_lock, "flush", flushed)
    monkeypatch.setattr(os, "link", linked)
    with quick(tmp_path):
        size = (tmp_path / LOCK_FILE).stat().st_size
    assert calls == [f"flush {size}", f"link {size}"]


def test_without_hard_links_one_whose_new_lock_was_taken_for_damage_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped between making the file and filling it."""

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / LOCK_FILE
    other = lock_text(this_process())  # who is alive
    real_open = Path.open

    def stopped_after(self: Path, mode: str = "r", *more: Any, **values: Any) -> Any:
        file = real_open(self, mode, *more, **values)
        if mode == "xb" and self == path:
            path.unlink()
            path.write_bytes(other)
        return file

    monkeypatch.setattr(Path, "open", stopped_after)
    with pytest.raises(UserError, match="another run is at work there"), quick(tmp_path):
        pass
    assert path.read_bytes() == other


def test_a_lock_that_is_released_while_it_is_watched_is_free(tmp_path: Path) -> None:
    leave(tmp_path, replace(this_process(), host="other"))
    timer = threading.Timer(0.3, (tmp_path / LOCK_FILE).unlink)
    timer.start()
    began = time.monotonic()
    with quick(tmp_path, stale_seconds=30.0):
        assert time.monotonic() - began < 20.0


def test_the_counter_moves_in_place_and_keeps_the_rest(tmp_path: Path) -> None:
    with quick(tmp_path, renew_seconds=0.02):
        first = json.loads((tmp_path / LOCK_FILE).read_text())
        inode = (tmp_path / LOCK_FILE).stat().st_ino
        deadline = time.monotonic() + 10.0
        while (now := json.loads((tmp_path / LOCK_FILE).read_text()))["counter"] < "000000000003":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (tmp_path / LOCK_FILE).stat().st_ino == inode
        assert {**now, "counter": ""} == {**first, "counter": ""}


def test_a_stolen_lock_is_noticed_and_not_deleted(tmp_path: Path) -> None:
    lines: list[str] = []
    with quick(tmp_path, lines, renew_seconds=0.02) as lock:
        assert not lock.is_lost
        thief = lock_text(replace(this_process(), host="thief"))
        (tmp_path / "new").write_bytes(thief)
        (tmp_path / "new").replace(tmp_path / LOCK_FILE)
        deadline = time.monotonic() + 10.0
        while not lock.is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.is_lost
    assert (tmp_path / LOCK_FILE).read_bytes() == thief  # neither renewed nor deleted
    assert len(lines) == 1
    assert f"taken over by process {os.getpid()} on thief" in lines[0]


def test_a_lock_stolen_between_two_renewals_is_not_deleted(tmp_path: Path) -> None:
    with quick(tmp_path, renew_seconds=60.0):
        thief = lock_text(replace(this_process(), host="thief"))
        (tmp_path / LOCK_FILE).write_bytes(thief)
    assert (tmp_path / LOCK_FILE).read_bytes() == thief


def test_who_asks_before_a_renewal_finds_the_lock_lost(tmp_path: Path) -> None:
    """And is told why, instead of the one who speaks for the lock."""
    lines: list[str] = []
    told: list[str] = []
    with quick(tmp_path, lines, renew_seconds=60.0) as lock:
        lock.when_lost(lambda: told.append("before"))
        lock.check()
        assert told == []
        thief = lock_text(replace(this_process(), host="thief"))
        (tmp_path / LOCK_FILE).write_bytes(thief)
        with pytest.raises(LostLockError, match=r"taken over by process .* on thief"):
            lock.check()
        assert lock.is_lost
        assert not lock.is_held()
        lock.when_lost(lambda: told.append("after"))
    assert told == ["before", "after"]
    assert lines == []


def test_a_disk_that_fails_does_not_say_that_a_lock_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick(tmp_path, renew_seconds=60.0) as lock:
        with monkeypatch.context() as broken:

            def fail(*_: object, **__: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            broken.setattr(Path, "open", fail)
            assert lock.is_held()
        assert lock.is_held()


def test_a_deleted_lock_is_noticed(tmp_path: Path) -> None:
    lines: list[str] = []
    with quick(tmp_path, lines, renew_seconds=0.02) as lock:
        (tmp_path / LOCK_FILE).unlink()
        deadline = time.monotonic() + 10.0
        while not lock.is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(lines) == 1
    assert "was deleted" in lines[0]


def test_of_many_who_start_at_once_one_gets_it(tmp_path: Path) -> None:
    assert outcomes_of_race(tmp_path / "new", seconds=3.0) == ["HELD"] + ["REFUSED"] * 3


@pytest.mark.parametrize("where", ["here", "other"])
def test_of_many_who_see_a_stale_lock_at_once_one_gets_it(tmp_path: Path, where: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    us = this_process()
    leave(
        tmp_path,
        replace(us, pid=ended.pid, host=us.host if where == "here" else "other", started_ticks=1),
    )
    assert outcomes_of_race(tmp_path, seconds=4.0) == ["HELD"] + ["REFUSED"] * 3
    assert list(tmp_path.iterdir()) == []


def outcomes_of_race(folder: Path, *, seconds: float) -> list[str]:
    racers = [start_holder(folder, seconds=seconds, stale_seconds=0.6) for _ in range(4)]
    for racer in racers:
        go(racer)
    texts = [racer.communicate(timeout=60)[0] for racer in racers]
    return sorted(word for text in texts for word in ("HELD", "REFUSED") if word in text)


def test_one_who_is_slower_in_a_takeover_leaves_the_lock_of_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two see the same stale lock; the second acts only when the first has finished."""
    stale = replace(this_process(), host="other", token="stale")
    leave(tmp_path, stale)
    faster = lock_text(replace(this_process(), token="faster"))
    take_over = run_lock._take_over

    def late(path: Path, found: bytes, holder: Holder, *, stale_seconds: float) -> bool:
        path.write_bytes(faster)
        return take_over(path, found, holder, stale_seconds=stale_seconds)

    monkeypatch.setattr(run_lock, "_take_over", late)
    with pytest.raises(UserError, match="another run is at work"), quick(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_bytes() == faster
    assert [p.name for p in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_takeover_that_was_killed_on_the_way_blocks_nobody_for_long(tmp_path: Path) -> None:
    leave(tmp_path, replace(this_process(), host="other"))
    (tmp_path / TAKEOVER_FILE).write_bytes(b"")
    began = time.monotonic()
    with quick(tmp_path, stale_seconds=0.3):
        assert time.monotonic() - began < 20.0
    assert list(tmp_path.iterdir()) == []


def test_what_was_killed_on_the_way_to_a_lock_is_cleared_away(tmp_path: Path) -> None:
    for name in (f"{LOCK_FILE}.0123", TAKEOVER_FILE):
        (tmp_path / name).write_bytes(lock_text(this_process()))
    with quick(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("when", ["before the link", "after it failed"])
def test_one_whose_file_was_cleared_away_on_its_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    faster = lock_text(replace(this_process(), token="faster"))
    link = os.link

    def late(source: Path, target: Path) -> None:
        target.write_bytes(faster)
        source.unlink()
        if when == "after it failed":
            raise FileExistsError(errno.EEXIST, "File exists")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(UserError, match="another run is at work"), quick(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_bytes() == faster


@pytest.mark.parametrize("number", [errno.EPERM, errno.EEXIST])
def test_without_hard_links_exactly_one_still_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    link = os.link

    def refuse(source: Path, target: Path) -> None:
        if number == errno.EEXIST:  # NFS: the link was made, the answer was lost, the retry failed
            link(source, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with quick(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        assert [p.name for p in tmp_path.iterdir()] == [LOCK_FILE]
        if number == errno.EEXIST:
            monkeypatch.setattr(os, "link", link)
        with pytest.raises(UserError, match="another run"), quick(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_lock_is_a_users_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(self: Path, content: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError, match=os.strerror(number)), quick(tmp_path / "run"):
        pass
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"), quick(tmp_path / "file"):
        pass


def test_a_disk_that_fails_later_is_borne_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    open_path = Path.open

    def fail(self: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if mode == "r+b":
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_path(self, mode, *rest, **named)

    lines: list[str] = []
    with quick(tmp_path, lines, renew_seconds=0.02) as lock:
        monkeypatch.setattr(Path, "open", fail)
        assert failed.wait(10.0)
        monkeypatch.undo()
        before = (tmp_path / LOCK_FILE).read_bytes()
        deadline = time.monotonic() + 10.0
        while (tmp_path / LOCK_FILE).read_bytes() == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not lock.is_lost
    assert lines == []


def test_opening_and_emptying_the_folder_leaves_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with quick(folder):
        check_run_folder(str(folder), resume=False, overwrite=False)  # only our lock is there
        open_run_folder(str(folder), resume=False, overwrite=False)
        (folder / "run.yaml").write_text("steps: 5\n")
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "x").touch()
        lock = (folder / LOCK_FILE).read_bytes()
        open_run_folder(str(folder), resume=False, overwrite=True)
        assert [p.name for p in folder.iterdir()] == [LOCK_FILE]
        assert (folder / LOCK_FILE).read_bytes()[30:] == lock[30:]
