"""Rates without warm-up, the smoothed loss, and the lines that are written."""

import io
import json
from pathlib import Path

import pytest

from bertsmith.checkpoint.state import RunState
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import Speaker, TrainingDisplay
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.step import StepReport


def report(step: int, *, loss: float = 2.0, seconds: float = 0.5) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        num_targets=10,
        idle_share=0.0,
        num_tokens=100,
        seconds=seconds,
        is_applied=True,
        has_overflowed=False,
    )


def log_of(metrics: MetricsLog, *, gemm: float | None = None) -> TrainingLog:
    return TrainingLog(
        metrics,
        TrainingDisplay(Speaker(stream=io.StringIO())),
        log_every_steps=5,
        flop_per_token=3e6,
        gemm_flop_per_second=gemm,
    )


def test_the_first_three_steps_do_not_count_as_speed(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as metrics:
        log = log_of(metrics, gemm=1.2e9)
        assert log.tokens_per_second is None
        for step in range(1, 11):
            seconds = 60.0 if step <= 3 else 0.5
            log.report(report(step, seconds=seconds), RunState(step=step), step / 10)
            if step == 3:
                assert log.tokens_per_second == pytest.approx(300 / 180)
        assert log.tokens_per_second == pytest.approx(200.0)
        assert log.gemm_share == pytest.approx(3e6 * 200 / 1.2e9)


def test_lines_are_the_first_each_fifth_and_the_last(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_done=0, say=pytest.fail) as metrics:
        log = log_of(metrics)
        for step in range(1, 13):
            state = RunState(step=step, tokens=100 * step, elapsed_seconds=1.23456 * step)
            log.report(report(step, loss=1.0 / step), state, step / 12)
            if step == 6:
                log.scores({"loss": 3.0}, state)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 6, 10, 12]
    assert lines[2] == {"step": 6, "valid_loss": 3.0}
    assert lines[1] == {
        "step": 5,
        "loss": 0.2,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "real_tokens": 500,
        "seconds": 6.173,
        "tokens_per_second": 200.0,
    }
