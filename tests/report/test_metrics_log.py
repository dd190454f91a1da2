"""metrics.jsonl: flushed lines, no doubles after a resume, valid JSON whatever the numbers."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.errors import UserError
from bertsmith.report.metrics_log import MetricsLog


def lines_of(folder: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as log:
        log.write(1, {"loss": 2.5, "real_tokens": 7}, at_seconds=1.0)
        assert lines_of(tmp_path) == [{"step": 1, "loss": 2.5, "real_tokens": 7}]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as log:
        log.write(1, {"valid_perplexity": float("inf"), "loss": float("nan")}, at_seconds=1.0)
    assert lines_of(tmp_path) == [{"step": 1, "valid_perplexity": None, "loss": None}]


def test_a_resumed_run_drops_lines_after_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as log:
        for step in range(1, 8):
            log.write(step, {"loss": 1.0 / step}, at_seconds=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')  # killed while writing
    with MetricsLog(tmp_path, steps_done=4, say=pytest.fail) as log:
        log.write(5, {"loss": 9.0}, at_seconds=2.0)
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1.0 / 3),
        (4, 0.25),
        (5, 9.0),
    ]


def test_a_new_run_does_not_keep_lines_of_an_old_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as log:
        log.write(1, {"loss": 1.0}, at_seconds=1.0)
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail):
        pass
    assert lines_of(tmp_path) == []


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as log:
        for step in (10, 20):
            log.write(step, {"loss": 0.5 * step}, at_seconds=float(step))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("loss")] == [
        (10, 5.0, 10.0),
        (20, 10.0, 20.0),
    ]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written"):
        MetricsLog(tmp_path, steps_done=0, say=pytest.fail)


def judged_run(folder: Path) -> None:
    """Four steps, the second and the last one evaluated."""
    with MetricsLog(folder, steps_done=0, say=pytest.fail) as log:
        for step in range(1, 5):
            log.write(step, {"loss": 1.0 / step}, at_seconds=1.0)
            if step in (2, 4):
                log.write(step, {"valid_loss": 2.0 / step}, at_seconds=1.0)


def test_scores_of_a_step_that_is_evaluated_again_are_not_doubled(tmp_path: Path) -> None:
    judged_run(tmp_path)
    before = lines_of(tmp_path)
    with MetricsLog(tmp_path, steps_done=4, say=pytest.fail, is_judged_again=True) as log:
        log.write(4, {"valid_loss": 0.5}, at_seconds=2.0)
    assert lines_of(tmp_path) == before
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("valid_loss")] == [(2, 1.0), (4, 0.5)]
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]


def test_scores_of_a_step_that_is_not_evaluated_again_stay(tmp_path: Path) -> None:
    judged_run(tmp_path)
    before = lines_of(tmp_path)
    with MetricsLog(tmp_path, steps_done=4, say=pytest.fail) as log:
        assert lines_of(tmp_path) == before
        log.rewind(2, is_judged_again=True)
    assert lines_of(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


class BrokenDisk:
    """A file system on which nothing can be opened for writing, until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = False
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self.is_broken and set(mode) & set("wax+"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(file, mode, *args, **kwargs)

        monkeypatch.setattr(io, "open", opened)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BrokenDisk:
    return BrokenDisk(monkeypatch)


def test_a_file_that_cannot_be_opened_again_makes_lines_wait(
    tmp_path: Path, disk: BrokenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither lost nor doubled, and of the half line that was written nothing is left."""
    said: list[str] = []

    class Full:
        """Takes half a line, then nothing."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, text: str) -> None:
            self.file.write(text[:5])
            self.file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsLog(tmp_path, steps_done=0, say=said.append) as log:
        log.write(1, {"loss": 1.0}, at_seconds=1.0)
        log._file, disk.is_broken = Full(log._file), True  # type: ignore[assignment]
        for step in (2, 3):
            log.write(step, {"loss": 1.0}, at_seconds=1.0)
            assert log.is_waiting
            with pytest.raises(NotWrittenError, match=r"metrics\.jsonl: cannot be written \(Input"):
                log.flush_to_disk()
        disk.is_broken = False
        log.write(4, {"loss": 1.0}, at_seconds=1.0)
        log.flush_to_disk()
        assert not log.is_waiting
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    assert len(said) == 1
    assert "No space left on device: " in said[0]
    assert "are free); its lines wait in memory" in said[0]


def test_going_back_on_a_disk_that_fails_is_made_up_for(tmp_path: Path, disk: BrokenDisk) -> None:
    said: list[str] = []
    with MetricsLog(tmp_path, steps_done=0, say=said.append) as log:
        for step in range(1, 6):
            log.write(step, {"loss": 1.0}, at_seconds=1.0)
        disk.is_broken = True
        log.rewind(3)
        log.rewind(2)
        log.write(3, {"loss": 2.0}, at_seconds=1.0)
        with pytest.raises(NotWrittenError):
            log.flush_to_disk()
        disk.is_broken = False
        log.flush_to_disk()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]
    assert len(said) == 1


def test_a_file_that_is_deleted_meanwhile_is_said_and_a_new_one_begun(tmp_path: Path) -> None:
    said: list[str] = []
    with MetricsLog(tmp_path, steps_done=0, say=said.append) as log:
        log.write(1, {"loss": 1.0}, at_seconds=1.0)
        (tmp_path / "metrics.jsonl").unlink()
        log.flush_to_disk()  # else no checkpoint would ever be made again
        log.write(2, {"loss": 1.0}, at_seconds=1.0)
    assert [line["step"] for line in lines_of(tmp_path)] == [2]
    assert [line.split(": ")[1] for line in said] == [
        "was deleted or replaced; lines are written to a new one"
    ]
