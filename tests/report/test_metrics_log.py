"""metrics.jsonl: flushed lines, no doubles after a resume, valid JSON whatever the numbers."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertsmith.errors import UserError
from bertsmith.report.metrics_log import MetricsLog


def lines_of(folder: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0) as log:
        log.write(1, {"loss": 2.5, "real_tokens": 7}, at_seconds=1.0)
        assert lines_of(tmp_path) == [{"step": 1, "loss": 2.5, "real_tokens": 7}]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0) as log:
        log.write(1, {"valid_perplexity": float("inf"), "loss": float("nan")}, at_seconds=1.0)
    assert lines_of(tmp_path) == [{"step": 1, "valid_perplexity": None, "loss": None}]


def test_a_resumed_run_drops_lines_after_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0) as log:
        for step in range(1, 8):
            log.write(step, {"loss": 1.0 / step}, at_seconds=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')  # killed while writing
    with MetricsLog(tmp_path, steps_done=4) as log:
        assert log.last_loss == 0.25
        log.write(5, {"loss": 9.0}, at_seconds=2.0)
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1.0 / 3),
        (4, 0.25),
        (5, 9.0),
    ]


def test_a_new_run_does_not_keep_lines_of_an_old_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0) as log:
        log.write(1, {"loss": 1.0}, at_seconds=1.0)
    with MetricsLog(tmp_path, steps_done=0) as log:
        assert log.last_loss is None
    assert lines_of(tmp_path) == []


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0) as log:
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
        MetricsLog(tmp_path, steps_done=0)
