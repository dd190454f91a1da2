"""The learning rate's course, against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.train.config import OptimConfig
from bertsmith.train.schedule import learning_rate


def config(schedule: str, **more: object) -> OptimConfig:
    """Peak 1.0, warm-up over a tenth."""
    return OptimConfig(learning_rate=1.0, schedule=schedule, warmup_share=0.1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        ("linear", 0.05, 0.5),
        ("linear", 0.1, 1.0),
        ("linear", 0.55, 0.5),
        ("linear", 1.0, 0.0),
        ("cosine", 0.1, 1.0),
        ("cosine", 0.55, 0.5),
        ("cosine", 0.325, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 1.0, 0.0),
        ("wsd", 0.5, 1.0),
        ("wsd", 0.79, 1.0),
        ("wsd", 0.9, 0.5),
        ("wsd", 1.0, 0.0),
        ("constant", 0.05, 0.5),
        ("constant", 1.0, 1.0),
    ],
)
def test_rates_are_those_of_the_formulas(schedule: str, progress: float, expected: float) -> None:
    rate = learning_rate(config(schedule), progress=progress, step=10_000)
    assert rate == pytest.approx(expected, abs=1e-12)


def test_warm_up_in_steps_rises_evenly_and_never_starts_at_zero() -> None:
    settings = config("constant", warmup_steps=4)
    rates = [learning_rate(settings, progress=0.0, step=step) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@given(
    schedule=st.sampled_from(["linear", "cosine", "wsd", "constant"]),
    progress=st.floats(-0.5, 1.5),
    step=st.integers(0, 10**6),
    warmup=st.sampled_from([None, 0, 5]),
)
def test_a_rate_is_never_negative_nor_above_the_peak(
    schedule: str, progress: float, step: int, warmup: int | None
) -> None:
    settings = config(schedule, warmup_steps=warmup)
    assert 0.0 <= learning_rate(settings, progress=progress, step=step) <= 1.0


def test_after_warm_up_in_steps_the_decay_starts_at_the_peak() -> None:
    """100 steps, 20 of warm-up: the rate is 1 at step 20 and half of it at step 60."""
    settings = config("linear", warmup_steps=20)
    rates = [learning_rate(settings, progress=s / 100, step=s) for s in (20, 60, 100)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])
