"""How a run stands, for whoever started it."""

import errno
import json
import os
import shlex
import socket
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bertsmith.report import run_status
from bertsmith.report.run_status import RunStatus, resume_command, write_status


def a_status(folder: Path) -> RunStatus:
    return RunStatus(
        status="resumable",
        verb="pretrain",
        step=120,
        checkpoint="checkpoints/step-120",
        command=resume_command("pretrain", folder),
        reason="SIGTERM",
    )


def test_what_is_written_is_read_and_names_all_a_launcher_needs(tmp_path: Path) -> None:
    status = a_status(tmp_path)
    assert write_status(tmp_path, status)
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert found == asdict(status)
    assert found["status"] == "resumable"
    assert (found["verb"], found["step"]) == ("pretrain", 120)
    assert found["checkpoint"] == "checkpoints/step-120"
    assert (found["host"], found["pid"]) == (socket.gethostname(), os.getpid())
    written_at = datetime.fromisoformat(found["written_at"])
    assert written_at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - written_at) < timedelta(minutes=1)
    assert [p.name for p in tmp_path.iterdir()] == ["run_status.json"]


def test_the_command_survives_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's; $(a run)"
    words = shlex.split(resume_command("finetune", folder))
    assert words == ["bertsmith", "finetune", "--config", f"{folder}/run.yaml", "--resume"]


def test_a_reason_is_one_line_and_any_path_can_be_written(tmp_path: Path) -> None:
    status = RunStatus(
        status="failed",
        verb="pretrain",
        step=0,
        checkpoint=None,
        command="bertsmith \udcff",  # a path that is not UTF-8, as Python has it
        reason="ValueError: a\n  b\nc",
    )
    assert write_status(tmp_path, status)
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert (found["reason"], found["command"]) == ("ValueError: a b c", "bertsmith \udcff")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_raises_nothing_and_keeps_the_older_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    older = a_status(tmp_path)
    write_status(tmp_path, older)

    def fail(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_status, "write_whole", fail)
    lines: list[str] = []
    assert not write_status(tmp_path, a_status(tmp_path), log=lines.append)
    assert not write_status(tmp_path, a_status(tmp_path))
    assert len(lines) == 1
    assert os.strerror(number) in lines[0]
    assert capsys.readouterr().err == lines[0] + "\n"
    assert json.loads((tmp_path / "run_status.json").read_text()) == asdict(older)
