"""What a person sees: plain lines in a log, a live line on a terminal."""

import io
import re
from pathlib import Path

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


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    (tmp_path / "log.txt").mkdir()
    speaker = Speaker(tmp_path, stream=stream)
    speaker.say("one")
    speaker.say("two")
    assert stream.getvalue() == "one\ntwo\n"
