"""What a person sees: plain lines in a log, a live line on a terminal."""

import errno
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertsmith.report import progress as module
from bertsmith.report.progress import BytesDisplay, Reading, Speaker, TrainingDisplay


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_seconds = 100.0

    def monotonic(self) -> float:
        return self.now_seconds

    def strftime(self, form: str) -> str:
        return "2026-01-01 00:00:00 "


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def reading(step: int, progress: float) -> Reading:
    return Reading(
        step=step,
        progress=progress,
        loss=2.34567,
        learning_rate=5e-4,
        grad_norm=1.234,
        tokens_per_second=12345.6,
        gemm_share=0.567,
    )


def test_lines_go_to_the_stream_and_to_the_log_word_for_word(tmp_path: Path, clock: Clock) -> None:
    stream = io.StringIO()
    speaker = Speaker(tmp_path, stream=stream)
    speaker.say("a [MASK] stays [bold]as it is[/bold] " + "x" * 200)
    speaker.log("for the log alone")
    line = "a [MASK] stays [bold]as it is[/bold] " + "x" * 200
    assert stream.getvalue() == line + "\n"
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "2026-01-01 00:00:00 " + line,
        "2026-01-01 00:00:00 for the log alone",
    ]


def test_without_a_terminal_there_is_a_line_first_last_and_each_half_minute(clock: Clock) -> None:
    stream = io.StringIO()
    with TrainingDisplay(Speaker(stream=stream)) as display:
        for step in range(1, 101):
            clock.now_seconds += 1.0
            display.show(reading(step, step / 100), is_last=step == 100)
    lines = stream.getvalue().splitlines()
    assert [int(re.findall(r"step (\d+)", line)[0]) for line in lines] == [1, 31, 61, 91, 100]
    assert "loss 2.3457  lr 5.00e-04  grad 1.23  12,346 tokens/s  57% of GEMM" in lines[1]
    assert lines[1].endswith("1:11 left")  # 30 steps in 31 s, 69 to go
    assert "left" not in lines[-1]
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_on_a_terminal_the_line_is_live_and_still_names_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    with TrainingDisplay(Speaker(stream=stream)) as display:
        display.show(reading(1, 0.5), is_last=False)
    written = stream.getvalue()
    assert "\x1b" in written
    for part in ("50.0%", "loss 2.3457", "12,346 tokens/s", "57% of GEMM"):
        assert part in written


def test_bytes_are_shown_with_rate_and_time_left(clock: Clock) -> None:
    stream = io.StringIO()
    display = BytesDisplay(Speaker(stream=stream), "tokenising")
    for done in range(0, 101, 10):
        clock.now_seconds += 10.0
        display.advance(done * 10**6, 100 * 10**6)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tokenising  20.0 of 100.0 MB  0.7 MB/s  2:00 left"
    assert lines[-1].startswith("tokenising  100.0 of 100.0 MB")
    assert len(lines) == 4  # after 30, 60 and 90 s, and at the end


def test_before_the_first_bytes_no_time_is_guessed(clock: Clock) -> None:
    stream = io.StringIO()
    display = BytesDisplay(Speaker(stream=stream), "tokenising")
    clock.now_seconds += 60.0
    display.advance(0, 100 * 10**6)
    assert stream.getvalue() == "tokenising  0.0 of 100.0 MB\n"


def test_a_log_on_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, clock: Clock) -> None:
    stream = io.StringIO()
    (tmp_path / "log.txt").mkdir()
    speaker = Speaker(tmp_path, stream=stream)
    speaker.say("one")
    speaker.say("two")
    said = stream.getvalue().splitlines()
    assert [said[0], said[2]] == ["one", "two"]
    assert "log.txt: cannot be written (Is a directory)" in said[1]
    (tmp_path / "log.txt").rmdir()
    speaker.say("three")
    speaker.say("four")
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "lines lost here, which could not be written: 2",
        "three",
        "four",
    ]
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").mkdir()  # it happens again
    speaker.log("five")
    assert len(stream.getvalue().splitlines()) == 6


def test_a_line_that_fits_only_in_part_is_not_left_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = Speaker(tmp_path, stream=io.StringIO())
    speaker.log("whole")
    before = (tmp_path / "log.txt").read_bytes()
    honest = module._write_all

    def fill(raw: Any, content: bytes) -> None:
        honest(raw, content[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write_all", fill)
    speaker.log("in part")
    assert (tmp_path / "log.txt").read_bytes() == before
    monkeypatch.setattr(module, "_write_all", honest)
    speaker.log("a path \udcff")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == [
        "whole",
        "lines lost here, which could not be written: 1",
        "a path \\udcff",
    ]


def test_short_writes_are_gone_on_with() -> None:
    class Narrow:
        taken = b""

        def write(self, content: memoryview) -> int:
            self.taken += bytes(content[:3])
            return min(3, len(content))

    narrow = Narrow()
    module._write_all(narrow, b"0123456789")
    assert narrow.taken == b"0123456789"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the always-full device")
def test_standard_error_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    """Its exit code stays too: Python makes 120 of output that cannot be flushed at the end."""
    code = f"""
import sys
from pathlib import Path
from bertsmith.report.progress import Speaker
speaker = Speaker(Path({str(tmp_path)!r}))
for n in range(3):
    speaker.say(str(n))
sys.exit(75)
"""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stderr=full, check=False)
    assert ended.returncode == 75
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["0", "1", "2"]
