"""Packs hold everything, are full, and are all alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertsmith.data import packing
from bertsmith.data.packing import longest_first, plan_packs
from small_corpus import skewed_lengths


@given(
    lengths=st.lists(st.integers(1, 64), max_size=200),
    capacity=st.integers(64, 300),
)
def test_every_sequence_has_one_place_and_no_pack_is_over_full(
    lengths: list[int], capacity: int
) -> None:
    lengths_S = np.array(lengths, np.int64)
    shapes = plan_packs(lengths_S, capacity_tokens=capacity)
    assert sorted(shapes.places_S.tolist()) == list(range(len(lengths)))
    at_place = np.sort(lengths_S)[::-1]
    totals = [int(at_place[shapes.places_of(p)].sum()) for p in range(shapes.num_packs)]
    assert all(0 < total <= capacity for total in totals)
    # Twice the optimum is the bound for any plan that opens a pack only when forced to.
    assert shapes.num_packs <= 2 * -(-sum(lengths) // capacity)


def test_packs_of_skewed_lengths_are_97_percent_full_and_weigh_alike() -> None:
    lengths_S = np.minimum(np.array(skewed_lengths(4000)) + 2, 512)
    shapes = plan_packs(lengths_S, capacity_tokens=4096)
    assert lengths_S.sum() / (shapes.num_packs * 4096) >= 0.97
    at_place = np.sort(lengths_S)[::-1]
    packs = [at_place[shapes.places_of(p)] for p in range(shapes.num_packs)]
    totals = [int(p.sum()) for p in packs]
    assert max(totals) - min(totals) <= 4096 // 50
    work = [int((p**2).sum()) for p in packs]
    assert max(work) / min(work) < 1.2


@pytest.mark.parametrize(
    ("shortest", "longest", "a_pack", "tries"),
    [(257, 512, 1, 1), (129, 170, 3, 1), (86, 250, 2, 14)],
)
def test_sequences_that_fill_packs_badly_are_planned_in_few_tries(
    monkeypatch: pytest.MonkeyPatch, shortest: int, longest: int, a_pack: int, tries: int
) -> None:
    tried: list[int] = []
    deal = packing._deal

    def counted(counts: NDArray[np.signedinteger], num_packs: int, capacity: int) -> object:
        tried.append(num_packs)
        return deal(counts, num_packs, capacity)

    monkeypatch.setattr(packing, "_deal", counted)
    lengths_S = np.random.default_rng(0).integers(shortest, longest, 200_000, endpoint=True)
    shapes = plan_packs(lengths_S, capacity_tokens=512)
    assert len(tried) <= tries
    assert shapes.num_packs <= -(-len(lengths_S) // a_pack)
    if tries == 1:
        assert shapes.num_packs == -(-len(lengths_S) // a_pack)


def test_packs_of_ordinary_text_are_99_percent_full() -> None:
    lengths_S = np.minimum(np.array(skewed_lengths(40_000)) + 2, 512)
    shapes = plan_packs(lengths_S, capacity_tokens=4096)
    assert lengths_S.sum() / (shapes.num_packs * 4096) >= 0.99


def test_the_plan_depends_on_the_lengths_and_not_on_their_order() -> None:
    rng = np.random.default_rng(0)
    lengths_S = rng.integers(1, 100, 500)
    first = plan_packs(lengths_S, capacity_tokens=128)
    second = plan_packs(rng.permutation(lengths_S), capacity_tokens=128)
    assert np.array_equal(first.places_S, second.places_S)
    assert np.array_equal(first.starts_P1, second.starts_P1)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80), num_packs=st.integers(1, 30))
def test_packs_are_dealt_longest_first_to_the_roomiest(lengths: list[int], num_packs: int) -> None:
    """Against the rule in words: a length goes round, one a pack, most room first."""
    rooms = [40] * num_packs
    expected: list[int] | None = []
    for length in sorted(set(lengths), reverse=True):
        left = lengths.count(length)
        while left and expected is not None:
            order = sorted(range(num_packs), key=lambda pack: (-rooms[pack], pack))
            chosen = [pack for pack in order[:left] if rooms[pack] >= length]
            if not chosen:
                expected = None
                break
            for pack in chosen:
                rooms[pack] -= length
            expected += chosen
            left -= len(chosen)
    dealt = packing._deal(np.bincount(lengths), num_packs, 40)
    assert (None if dealt is None else dealt.tolist()) == expected


def test_equals_change_places_and_others_do_not() -> None:
    lengths_S = np.array([3, 9, 3, 7, 3])
    orders = {
        tuple(longest_first(lengths_S, np.random.default_rng(seed)).tolist()) for seed in range(99)
    }
    assert {order[:2] for order in orders} == {(1, 3)}
    assert len(orders) == 6  # the three equals in every order


def test_what_fits_no_pack_is_refused() -> None:
    for lengths in ([5, 0], [5, 65]):
        with pytest.raises(ValueError, match="pack of 64 tokens"):
            plan_packs(np.array(lengths), capacity_tokens=64)
    assert plan_packs(np.zeros(0, np.int64), capacity_tokens=64).num_packs == 0
