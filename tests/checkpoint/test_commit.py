"""Whatever the disk does, what was saved before stays, and nothing half is left."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.checkpoint.commit import NotWrittenError, commit, recover_replaced
from bertsmith.checkpoint.folder import newest_checkpoint
from bertsmith.checkpoint.manifest import verify
from checkpoint.conftest import Save


def failing(number: int, code: int, real: Callable[..., None]) -> Callable[..., None]:
    """A system call that fails at its n-th use."""
    calls = 0

    def call(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(code, os.strerror(code))
        real(*args, **kwargs)

    return call


def failure_of(do: Callable[[], object]) -> str | None:
    """What could not be written, in words."""
    try:
        do()
    except NotWrittenError as error:
        return str(error)
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_fails_at_any_call_leaves_what_was_there(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    good = save(tmp_path, 1)
    tried = 0
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(number, code, getattr(os, name)))
            failure = failure_of(lambda: save(tmp_path, 2))
        if failure is None:
            break
        tried += 1
        assert "step-2: the checkpoint could not be written" in failure
        assert os.strerror(code) in failure
        if code == errno.ENOSPC:  # 1,024 bytes of the model, 2 moments of 7 x 3 + 3 floats
            assert re.search(r"it needs 1,216 bytes, [\d,]+ are free", failure)
        if (tmp_path / "step-2").exists():  # the rename had been made; only its flush failed
            assert newest_checkpoint(tmp_path, pytest.fail) == tmp_path / "step-2"
            (tmp_path / "step-2").rename(tmp_path.parent / f"{tmp_path.name}-{number}")
        assert newest_checkpoint(tmp_path, pytest.fail) == good
        assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    # Four files, the manifest, their folder, and the folder above it.
    assert tried == {"fsync": 7, "rename": 1}[name]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 5)
    path.rename(tmp_path / ".old-step-5")  # as a process killed there leaves it
    assert newest_checkpoint(tmp_path, pytest.fail) == path
    save(tmp_path, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


def test_what_is_left_of_a_replacement_that_was_made_is_deleted(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 5)
    (tmp_path / ".old-step-5").mkdir()
    recover_replaced(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


def test_what_a_process_killed_while_saving_left_is_swept(tmp_path: Path, save: Save) -> None:
    (tmp_path / ".tmp-step-7-12345").mkdir()
    (tmp_path / ".tmp-step-7-12345" / "model.safetensors").write_bytes(b"half")
    save(tmp_path, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["step-8"]


def test_a_fault_of_ours_while_writing_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commit(tmp_path, step=1, write=write, about={}, needed_bytes=0)
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_replacement_that_fails_at_any_call_leaves_the_old_or_the_new_in_place(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = save(tmp_path, 5, value=1.0)
    tried = 0
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(number, errno.EIO, getattr(os, name)))
            failure = failure_of(lambda: save(tmp_path, 5, value=2.0))
        if failure is None:
            break
        tried += 1
        assert path.is_dir(), f"neither is there after {name} number {number}"
        value = verify(path)["value"]
        assert value == (2.0 if (name, number) == ("fsync", 8) else 1.0)
        if value == 2.0:  # the new one is there, and its name may not be safe: put the old one back
            save(tmp_path, 5, value=1.0)
        assert newest_checkpoint(tmp_path, pytest.fail) == path
        assert [p.name for p in tmp_path.iterdir()] == ["step-5"]
    # Four files, the manifest, their folder, and the folder above after each rename.
    assert tried == {"fsync": 8, "rename": 2}[name]
    assert verify(path)["value"] == 2.0
