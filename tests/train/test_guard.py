"""What counts as a spike, and how many bad steps are too many."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.train.guard import SPIKE_HISTORY, is_too_many, spike_limit, with_loss


def test_a_limit_by_hand() -> None:
    """Losses 1.0 and 3.0 in turns: median 2, distance from it 1, so 2 + 8 x 1.4826."""
    losses = [1.0, 3.0] * 16
    assert spike_limit(losses, deviations=8.0) == pytest.approx(2.0 + 8.0 * 1.4826)


def test_a_flat_curve_is_not_all_spikes() -> None:
    """The spread is 0, and taken for 1 % of the median."""
    assert spike_limit([2.0] * 40, deviations=8.0) == pytest.approx(2.0 + 8.0 * 0.02)


def test_few_losses_tell_nothing() -> None:
    assert spike_limit([1.0] * (SPIKE_HISTORY - 1), deviations=8.0) == math.inf


def test_an_earlier_spike_hides_no_later_one() -> None:
    """Median 3, half of the losses 2 away from it; the mean would be 32, its deviation 170."""
    losses = [*[1.0, 3.0] * 16, 1000.0]
    assert spike_limit(losses, deviations=8.0) == pytest.approx(3.0 + 8.0 * 1.4826 * 2.0)


@given(st.lists(st.floats(0.01, 20.0), max_size=200))
def test_the_window_is_the_last_64(losses: list[float]) -> None:
    window: tuple[float, ...] = ()
    for loss in losses:
        window = with_loss(window, loss)
    assert list(window) == losses[-64:]
    assert not window or spike_limit(window, deviations=8.0) > statistics.median(window)


def test_bad_steps_count_for_a_thousand_steps() -> None:
    assert not is_too_many([1, 2, 3], patience=3)
    assert is_too_many([1, 2, 3, 4], patience=3)
    assert not is_too_many([1, 2, 3, 1002], patience=3)  # the first two are long ago
