"""`prepare` on disks that fail, with processes that are killed, and with others at work there."""

import errno
import io
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data import corpus, part_workers, plan
from bertsmith.data.parts import bytes_needed, part_folder
from bertsmith.data.plan import Unit
from bertsmith.data.writing import WritingError
from bertsmith.errors import UserError
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare
from bertsmith.recipes.prepared_folder import PreparedFolder
from bertsmith.report.run_lock import LOCK_FILE, hold_run_lock

TEXTS = [f"text {n} is about {'this and ' * (n % 5)}that, {n * n}" for n in range(200)]
CONTENT = ["manifest.json", "tokenizer", "train", "valid"]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 4 kB, so that a little text is the work of several."""
    monkeypatch.setattr(plan, "UNIT_BYTES_LEAST", 4096)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


def config(text: Path, output: Path, **values: Any) -> PrepareConfig:
    usual = {"vocab_size": 150, "valid_share": 0.1, "workers": 1}
    return PrepareConfig(input=[str(text)], output=str(output), **(usual | values))


def content(folder: Path) -> dict[str, bytes]:
    """Of what was prepared; not of work that is to go on."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] in CONTENT
    }


def has_nothing_left_over(folder: Path) -> bool:
    return sorted(path.name for path in folder.iterdir()) == CONTENT


class Faults:
    """Fails the n-th of all writes, flushes and renames."""

    def __init__(self, number: int) -> None:
        self.at, self.stays, self.number = -1, False, number
        self.count = 0

    def arm(self, at: int, *, stays: bool) -> None:
        self.count, self.at, self.stays = 0, at, stays

    def pass_by(self) -> None:
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at > 0):
            raise OSError(self.number, os.strerror(self.number))


@contextmanager
def injected(faults: Faults) -> Iterator[None]:
    class Stream(io.FileIO):
        def write(self, data: Any, /) -> int:
            faults.pass_by()
            return super().write(data) or 0

    open_path = Path.open

    def open_it(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return Stream(path, "wb") if mode == "wb" else open_path(path, mode, *rest, **named)

    def failing(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            faults.pass_by()
            return honest(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_it)
        for owner, name in (
            (os, "fsync"),
            (Path, "rename"),
            (Path, "replace"),
            (Path, "mkdir"),
            (Path, "write_text"),
        ):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield


@pytest.mark.parametrize(
    ("number", "stays"),
    [(errno.EIO, False), (errno.ENOSPC, True)],
    ids=["I/O error once", "full from then on"],
)
def test_a_fault_at_any_write_flush_or_rename_is_a_line_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, number: int, stays: bool
) -> None:
    prepare(config(text, tmp_path / "old", vocab_size=120))
    prepare(config(text, tmp_path / "new"))
    old, new = content(tmp_path / "old"), content(tmp_path / "new")
    wanted = config(text, tmp_path / "out", overwrite=True)
    faults, reached = Faults(number), 0
    while True:
        reached += 1
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(tmp_path / "old", tmp_path / "out")
        faults.arm(reached, stays=stays)
        with injected(faults):
            try:
                prepare(wanted)
            except UserError as error:
                message = str(error)
            else:
                break
        assert "\n" not in message
        assert f"cannot be written ({os.strerror(number)}" in message
        assert "free" in message
        if not stays:  # a disk on which nothing can be renamed cannot be put back either
            assert content(tmp_path / "out") == old, reached
        assert not list((tmp_path / "out").rglob("*.tmp-*"))
        assert not list((tmp_path / "out").rglob("run.lock*"))
        # The very last flush may fail after all is in place, and what is done cannot be undone.
        assert prepare(wanted).status in ({"completed", "up to date"} if stays else {"completed"})
        assert content(tmp_path / "out") == new, reached
        assert has_nothing_left_over(tmp_path / "out")
    assert faults.count < reached  # none was hit: every one there is has been tried
    assert reached > 40


def test_the_line_names_part_place_and_bytes(text: Path, tmp_path: Path) -> None:
    faults = Faults(errno.ENOSPC)
    messages = []
    for at in range(1, 40):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        faults.arm(at, stays=False)
        with injected(faults), pytest.raises(UserError) as caught:
            prepare(config(text, tmp_path / "out"))
        messages.append(str(caught.value))
    at_a_document = [line for line in messages if f"part 2, documents from {text}:" in line]
    assert at_a_document
    assert all(" bytes more are needed, " in line for line in at_a_document)
    assert all("part-000001" in line for line in at_a_document)


def test_a_fault_in_the_result_says_how_much_of_it_is_still_to_come(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(text, tmp_path / "whole"))
    write_bytes = Path.write_bytes

    def fail(path: Path, data: Any) -> int:
        if path.name == "words-00000.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError) as caught:
        prepare(config(text, tmp_path / "out"))
    assert "build/train/words-00000.bin, at shards of the result" in str(caught.value)
    found = re.search(r"about ([\d,]+) bytes more are needed", str(caught.value))
    assert found
    sizes = {name: len(data) for name, data in content(tmp_path / "whole").items()}
    written = sizes["train/tokens-00000.bin"] + sizes["train/offsets-00000.bin"]
    missing = sum(size for name, size in sizes.items() if name.endswith(".bin")) - written
    # But for the end of each list of offsets, and bits that fill no byte.
    assert abs(int(found[1].replace(",", "")) - missing) <= 2 * (8 + 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the always-full device")
def test_a_disk_too_full_for_the_smallest_part_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes stay in a buffer until the file is closed."""
    (tmp_path / "a.txt").write_text("one thing\n\nand another")
    open_path = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        on_disk = Path("/dev/full") if path.name in ("tokens.bin", "words.bin") else path
        return open_path(on_disk, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match=r"No space left on device: .*part-000000.*part 1"):
        prepare(config(tmp_path / "a.txt", tmp_path / "out"))


def test_a_small_disk_is_filled_at_every_stage_and_made_larger(tmp_path: Path, text: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        prepare(config(text, tmp_path / "whole"))
        whole = content(tmp_path / "whole")
        messages = []
        for kib in range(16, 400, 24):
            subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)
            try:
                prepare(config(text, disk / "out"))
                break
            except UserError as error:
                messages.append(str(error))
        assert len(messages) > 3
        assert all("No space left on device" in line for line in messages)
        assert not any("\n" in line for line in messages)
        assert content(disk / "out") == whole
        assert has_nothing_left_over(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def many(tmp_path: Path, times: int) -> Path:
    path = tmp_path / "many.txt"
    path.write_text("\n\n".join(f"{t} {n}" for n in range(times) for t in TEXTS))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_names_its_part_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_workers, "SMALL_BYTES", 0)
    text = many(tmp_path, 200)
    wanted = config(text, tmp_path / "out", workers=2)
    shared_before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    killed: list[tuple[int, str]] = []

    def kill() -> None:
        while not killed:
            for folder in (tmp_path / "out" / "parts").glob("part-*.tmp-*"):
                pid = int(folder.name.rpartition("-")[2])
                os.kill(pid, signal.SIGSTOP)
                if folder.exists():  # it is at this part, and will be
                    killed.append((pid, folder.name))
                    os.kill(pid, signal.SIGKILL)
                    return
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(UserError) as caught:
        prepare(wanted)
    killer.join()
    message = str(caught.value)
    number = int(killed[0][1].split("-")[1])
    assert f"a process was killed at part {number + 1:,}, {text} from byte" in message
    assert "fewer than 2 workers" in message
    assert "\n" not in message
    assert multiprocessing.active_children() == []
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    if Path("/dev/shm").is_dir():
        mine = {n for n in os.listdir("/dev/shm") if f"{os.getpid()}" in n} - shared_before
        mine = {n for n in mine if "loky" not in n}  # scikit-learn's, from other tests
        assert mine == set()
    prepare(wanted)
    prepare(config(text, tmp_path / "whole"))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert has_nothing_left_over(tmp_path / "out")


def test_a_worker_that_meets_a_bad_document_or_disk_ends_all_with_a_line(tmp_path: Path) -> None:
    """As a command, under a limit on the size of a file, which a full disk is like."""
    text = many(tmp_path, 300)  # of three units
    good = text.read_bytes()
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bertsmith", "prepare", "--input", str(text)]
    command += ["--output", str(out), "--vocab_size", "120", "--workers", "2"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=limit, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    error = ended.stderr.splitlines()[-1]
    assert "cannot be written (File too large" in error
    assert f"documents from {text}:" in error
    assert "bytes more are needed" in error
    assert "Traceback" not in ended.stderr
    assert not list(out.rglob("*.tmp-*"))
    middle = good.index(b"\n\n", len(good) // 2) + 2
    text.write_bytes(good[:middle] + b"\xff" + good[middle + 1 :])
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert f"{text}: byte {middle:,} is not UTF-8" in ended.stderr.splitlines()[-1]
    assert not list(out.rglob("*.tmp-*"))
    text.write_bytes(good)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert has_nothing_left_over(out)


def test_our_own_fault_keeps_its_traceback_and_says_where_it_was(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertsmith.data.parts import PartMaker

    def fail(self: Any, *rest: Any) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(PartMaker, "_encode", fail)
    with pytest.raises(AssertionError, match="ours") as caught:
        prepare(config(text, tmp_path / "out"))
    assert caught.value.__notes__ == [f"at part 1, documents from {text}:1"]
    assert not list((tmp_path / "out").rglob("*.tmp-*"))

    def exhaust(self: Any, *rest: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(PartMaker, "_encode", exhaust)
    with pytest.raises(UserError, match=rf"part 1, documents from {text}:1: out of memory"):
        prepare(config(text, tmp_path / "out"))


def test_a_disk_that_cannot_be_read_is_named_with_line_and_byte(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def readline(self, *size: Any) -> bytes:
            if self.tell() >= 100:
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(*size)

    content = text.read_bytes()
    monkeypatch.setattr(corpus, "open_bytes", lambda path: Failing(content))
    where = content.index(b"\n", 99) + 1
    line = content.count(b"\n", 0, where) + 1
    with pytest.raises(UserError) as caught:
        prepare(config(text, tmp_path / "out"))
    assert str(caught.value) == f"{text}:{line}: cannot be read at byte {where}: Input/output error"


def test_input_that_changes_while_it_is_read_is_not_mixed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = part_workers.make_parts

    def change(*rest: Any, **named: Any) -> None:
        honest(*rest, **named)
        with text.open("a") as file:
            file.write("\n\nnew")

    monkeypatch.setattr("bertsmith.recipes.prepare.make_parts", change)
    with pytest.raises(UserError, match=r"a\.txt: was changed while it was being read"):
        prepare(config(text, tmp_path / "out"))
    monkeypatch.undo()
    counts = prepare(config(text, tmp_path / "out")).counts
    assert counts is not None
    assert counts["documents"] == len(TEXTS) + 1
    monkeypatch.setattr(
        "bertsmith.recipes.prepare.make_parts", lambda *rest, **named: text.unlink()
    )
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: No such file"):
        prepare(config(text, tmp_path / "out", vocab_size=140, overwrite=True))


def test_the_second_preparation_in_a_folder_is_refused_with_process_and_host(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with hold_run_lock(out, print):
        with pytest.raises(UserError, match=f"another run is at work there: process {os.getpid()}"):
            prepare(config(text, out))
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    prepare(config(text, out))
    assert has_nothing_left_over(out)


def test_a_shard_is_made_once_at_a_time_and_others_beside_it(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with PreparedFolder(str(out)).locked(print, shard="1/2"):
        assert prepare(config(text, out, shard="2/2")).status == "shard done"
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            prepare(config(text, out, shard="1/2"))
        with pytest.raises(UserError, match="another `bertsmith prepare` is writing"):
            prepare(config(text, out))
    assert prepare(config(text, out)).status == "completed"
    assert has_nothing_left_over(out)


def test_a_finished_folder_is_not_cleaned_under_another_at_work(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(config(text, out))
    (out / "parts").mkdir()
    with hold_run_lock(out, print), pytest.raises(UserError, match="another run is at work"):
        prepare(config(text, out))
    assert (out / "parts").exists()
    assert prepare(config(text, out)).status == "up to date"
    assert has_nothing_left_over(out)


def test_how_much_is_needed_follows_from_what_is_there(text: Path, tmp_path: Path) -> None:
    config_ = config(text, tmp_path / "out", shard="1/3")
    prepare(config_)
    started = PreparedFolder(config_.output).started_plan()
    assert started is not None
    units: list[Unit] = started.units()
    tokenizer = PreparedFolder(config_.output).tokenizer_there()
    assert tokenizer is not None
    fingerprint = tokenizer.vocab.fingerprint
    work = tmp_path / "out" / "parts"
    folder = part_folder(work, units[0], fingerprint)
    made = sum(file.stat().st_size for file in folder.iterdir())
    ratio = made / units[0].span_bytes[0]
    two = units[:2]
    sizes = [unit.span_bytes[0] for unit in two]
    for with_result, expected in (
        (False, ratio * sizes[1]),
        (True, ratio * sizes[1] + 0.75 * ratio * sum(sizes)),
    ):
        assert bytes_needed(two, work, fingerprint, with_result=with_result) == round(expected)
    # Nothing there: as much as the text, and the result.
    nowhere = bytes_needed(two, tmp_path / "none", fingerprint, with_result=True)
    assert nowhere == round(1.75 * sum(sizes))
    prepare(config(text, tmp_path / "whole"))
    result = sum(len(data) for name, data in content(tmp_path / "whole").items() if "bin" in name)
    estimate = bytes_needed(units, work, fingerprint, with_result=True)
    missing = ratio * sum(unit.span_bytes[0] for unit in units[1:])
    assert 0.7 < estimate / (missing + result) < 1.4


def test_a_writing_error_comes_back_whole_from_another_process() -> None:
    error = WritingError("file", "full", "part 3", 12)
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == "file: cannot be written (full) at part 3"
