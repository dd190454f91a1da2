"""Dropout drops what it says, from its arguments alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.model.dropout import NO_DROPOUT, apply_dropout, dropout_at, keep_of

MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1


def keeps(key: int, threshold: int, row: int, column: int) -> bool:
    """The hash in Python integers: splitmix64 of the row, then a 32-bit mixer of the column."""
    mixed = ((row + 1) * 0x9E3779B97F4A7C15 + key) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
    mixed ^= mixed >> 31
    bits = ((column ^ (mixed & MASK32)) * 0x7FEB352D) & MASK32
    bits = ((bits ^ (bits >> 15)) + (mixed >> 32)) & MASK32
    bits = (bits * 0x846CA68B) & MASK32
    return (bits ^ (bits >> 16)) >= threshold


@given(
    seed=st.integers(0, MASK64),
    site=st.integers(0, 2_000_000),
    row=st.integers(0, 1 << 40),
    column=st.integers(0, MASK32),
)
def test_the_tensor_form_is_the_integer_form(seed: int, site: int, row: int, column: int) -> None:
    drop = dropout_at(drop_prob=0.5, seed=seed, site=site)
    kept = keep_of(drop, torch.tensor([row]), torch.tensor([column]))
    assert bool(kept[0]) == keeps(drop.key, drop.threshold, row, column)


@pytest.mark.parametrize("drop_prob", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_chance_in_rows_columns_and_all(drop_prob: float) -> None:
    size = 1500
    drop = dropout_at(drop_prob=drop_prob, seed=11, site=2)
    kept = keep_of(drop, torch.arange(size)[:, None], torch.arange(size)).double()
    deviation = (drop_prob * (1 - drop_prob)) ** 0.5
    assert abs(float(kept.mean()) - (1 - drop_prob)) < 4 * deviation / size
    for line in (kept.mean(0), kept.mean(1)):  # 5.5 deviations: one chance in 10^4 over 3,000
        assert float((line - (1 - drop_prob)).abs().max()) < 5.5 * deviation / size**0.5


def test_neighbours_seeds_and_sites_are_independent() -> None:
    size = 1000
    rows, columns = torch.arange(size)[:, None], torch.arange(size)

    def centred(seed: int, site: int) -> torch.Tensor:
        drop = dropout_at(drop_prob=0.5, seed=seed, site=site)
        return keep_of(drop, rows, columns).double() - 0.5

    base = centred(1, 1)
    others = {
        "next seed": centred(2, 1),
        "next site": centred(1, 2),
        "next row": base.roll(1, 0),
        "next column": base.roll(1, 1),
    }
    for name, other in others.items():
        correlation = float((base * other).mean() / 0.25)
        assert abs(correlation) < 4.5 / size, name


def test_survivors_are_scaled_so_that_the_mean_stays() -> None:
    drop = dropout_at(drop_prob=0.25, seed=3, site=1)
    out = apply_dropout(torch.ones(300, 300), drop)
    assert sorted(set(out.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)


def test_no_seed_or_no_chance_is_no_dropout() -> None:
    assert dropout_at(drop_prob=0.3, seed=None, site=0) == NO_DROPOUT
    assert dropout_at(drop_prob=0.0, seed=5, site=0) == NO_DROPOUT
    hidden = torch.randn(3, 4)
    assert apply_dropout(hidden, NO_DROPOUT) is hidden
