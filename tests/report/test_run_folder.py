"""The run folder: refused, opened, replaced; files whole or absent."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import yaml

from bertsmith.errors import UserError
from bertsmith.recipes.config import PretrainConfig
from bertsmith.report.run_folder import (
    check_run_folder,
    open_run_folder,
    peak_memory_bytes,
    versions,
    write_config,
    write_summary,
    write_text,
)


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("steps: 5\n")
    (folder / "summary.json").write_text("{}")
    return folder


def test_a_new_or_empty_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    for _ in range(2):  # the second time it is there, and empty
        made = open_run_folder(str(tmp_path / "a" / "b"), resume=False, overwrite=False)
        assert list(made.iterdir()) == []


def test_another_run_is_refused_kept_or_replaced_as_told(old_run: Path) -> None:
    with pytest.raises(UserError, match=r"holds another run.*--resume.*--overwrite"):
        open_run_folder(str(old_run), resume=False, overwrite=False)
    check_run_folder(str(old_run), resume=False, overwrite=True)
    open_run_folder(str(old_run), resume=True, overwrite=True)  # to go on is the safer reading
    assert sorted(p.name for p in old_run.iterdir()) == ["run.yaml", "summary.json"]
    open_run_folder(str(old_run), resume=False, overwrite=True)
    assert list(old_run.iterdir()) == []


def test_files_that_are_no_run_and_plain_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path, message in (
        (tmp_path, "files that are no run"),
        (tmp_path / "notes.txt", "is a file"),
    ):
        with pytest.raises(UserError, match=message):
            open_run_folder(str(path), resume=False, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_a_killed_process_left_is_no_content_and_goes(tmp_path: Path) -> None:
    """Killed before run.yaml had its name, a run could never be started in that folder again."""
    (tmp_path / "checkpoints" / ".tmp-step-8-deleted").mkdir(parents=True)
    for name in (".run.yaml.tmp-123", ".probe-123", "run.yaml"):
        (tmp_path / name).touch()
    check_run_folder(str(tmp_path), resume=True, overwrite=False)
    open_run_folder(str(tmp_path), resume=True, overwrite=False)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["checkpoints", "run.yaml"]
    (tmp_path / "run.yaml").rename(tmp_path / ".run.yaml.tmp-124")
    (tmp_path / "checkpoints").rmdir()
    check_run_folder(str(tmp_path), resume=False, overwrite=False)
    (tmp_path / ".hidden").touch()  # somebody's own
    with pytest.raises(UserError, match="files that are no run"):
        check_run_folder(str(tmp_path), resume=False, overwrite=False)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output .*file/run: cannot be"):
        open_run_folder(str(tmp_path / "file" / "run"), resume=False, overwrite=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_a_users_mistake(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        open_run_folder(str(tmp_path / "run"), resume=False, overwrite=False)


def test_run_yaml_holds_the_whole_config_but_not_how_it_was_started(tmp_path: Path) -> None:
    config = PretrainConfig(data="d", model="bert-tiny", output="o", steps=3, resume=True)
    write_config(tmp_path, config)
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert values["optim"]["beta2"] == 0.98
    assert values["packing"] == {"tokens_per_pack": 4096, "max_sequence_tokens": 512}
    assert values["steps"] == 3
    assert not {"resume", "overwrite"} & values.keys()


def test_a_summary_is_json_for_any_reader(tmp_path: Path) -> None:
    write_summary(tmp_path, {"status": "failed", "train_loss": math.nan, "m": {"f1": math.inf}})
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"status": "failed", "train_loss": None, "m": {"f1": None}}


def test_a_file_is_written_whole_or_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    write_text(path, "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match=r"run\.yaml: cannot be written \(No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    assert 50 << 20 < before < 1 << 40  # torch alone is beyond 50 MiB
    assert peak_memory_bytes(torch.device("cpu")) >= before


def test_versions_name_what_the_numbers_depend_on() -> None:
    assert {"bertsmith", "python", "torch", "tokenizers"} <= versions().keys()
    assert versions()["torch"] == torch.__version__
