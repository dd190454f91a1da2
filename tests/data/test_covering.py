"""The guarantees of `data.covering`, for any units, shares and epochs."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.covering import UnitQueues, units_in_epoch
from bertsmith.data.keyed_random import child_keys, key_of
from bertsmith.data.rarity import BOOSTS_L, LOWEST, levels_of_types, speeds
from bertsmith.data.stream import PretrainStream
from small_corpus import ListCorpus, skewed_lengths

SHARES = st.one_of(
    st.integers(1, 99).map(lambda n: Fraction(n, 100)), st.floats(0.02, 0.97).map(Fraction)
)


def queues_of(sizes: list[list[int]], seed: int, speeds_G: list[float] | None = None) -> UnitQueues:
    """One group a list, of units of these tokens."""
    groups_U = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    return UnitQueues(
        groups_U=groups_U,
        tokens_U=np.array([n for group in sizes for n in group], np.int64),
        keys_U=child_keys(key_of(seed, 0), np.arange(len(groups_U))),
        speeds_G=np.ones(len(sizes)) if speeds_G is None else np.array(speeds_G),
        keys_G=child_keys(key_of(seed, 1), np.arange(len(sizes))),
    )


def history(queues: UnitQueues, shares: list[Fraction]) -> NDArray[np.bool_]:
    """What each epoch predicts, shape (E, U)."""
    laps = [Fraction(0)]
    for share in shares:
        laps.append(laps[-1] + share)
    laps_E = np.array([float(lap) for lap in laps])
    return np.array([units_in_epoch(queues, laps_E[: e + 2]) for e in range(len(shares))])


@settings(max_examples=60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=30), min_size=1, max_size=4),
    shares=st.one_of(
        st.tuples(SHARES, st.integers(1, 25)).map(lambda pair: [pair[0]] * pair[1]),
        st.lists(SHARES, min_size=1, max_size=20),
    ),
    seed=st.integers(0, 2**40),
)
def test_balance_coverage_and_share(
    sizes: list[list[int]], shares: list[Fraction], seed: int
) -> None:
    queues = queues_of(sizes, seed)
    chosen_EU = history(queues, shares)
    done = [sum(shares[:e], Fraction(0)) for e in range(len(shares) + 1)]
    counts_U = np.zeros(len(queues.groups_U), int)
    for epoch, chosen_U in enumerate(chosen_EU, start=1):
        counts_U += chosen_U
        laps = done[epoch]
        assert counts_U.min() >= math.floor(laps)
        assert counts_U.max() <= math.ceil(laps)
        predicted_G = np.bincount(queues.groups_U, counts_U * queues.tokens_U, len(sizes))
        for predicted, group in zip(predicted_G, sizes, strict=True):
            assert abs(predicted - float(laps * sum(group))) < max(group)
    for first in range(len(shares)):  # the shortest stretch from here that promises all
        last = next((e for e in range(first, len(done)) if done[e] - done[first] >= 1), None)
        if last is not None:
            assert chosen_EU[first:last].any(0).all()


@settings(max_examples=30)
@given(share=SHARES, num_tokens=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_of_single_tokens_each_epoch_takes_the_share_rounded_up_or_down(
    share: Fraction, num_tokens: int, seed: int
) -> None:
    chosen_EU = history(queues_of([[1] * num_tokens], seed), [share] * 12)
    for chosen_U in chosen_EU:
        assert abs(int(chosen_U.sum()) - float(share * num_tokens)) < 1


def test_every_epoch_predicts_the_share_of_tokens_and_equal_units_alike() -> None:
    """Over 4,000 keys, 4.5 standard deviations of a share of 0.15 are 0.026."""
    most = 4.5 * (0.15 * 0.85 / 4000) ** 0.5
    chosen_EU = history(queues_of([[3] * 6, [4]] * 4000, 3), [Fraction("0.15")] * 9)
    assert np.abs(chosen_EU.reshape(9, 4000, 7).mean(1) - 0.15).max() < most
    sizes = [1, 5, 2, 1, 3, 8]
    chosen_EU = history(queues_of([sizes] * 4000, 3), [Fraction("0.15")] * 9)
    tokens_E = (chosen_EU.reshape(9, 4000, 6) * sizes).sum((1, 2)) / (4000 * sum(sizes))
    assert np.abs(tokens_E - 0.15).max() < most


def test_neighbours_of_one_epoch_part_in_later_laps() -> None:
    """At 15 % parts mix: two tokens hidden together once are not bound to each other."""
    chosen_EU = history(queues_of([[1] * 200], 5), [Fraction("0.15")] * 60)
    first = chosen_EU[0]
    with_first = [int((first & later).sum()) for later in chosen_EU[40:]]
    assert max(with_first) < 0.7 * first.sum()
    assert not any((a & b).any() for a, b in pairwise(chosen_EU))  # but nothing comes twice at once


def test_a_share_that_divides_the_whole_repeats_its_parts() -> None:
    """Coverage leaves no choice then (docs/masking.md)."""
    chosen_EU = history(queues_of([[1] * 40], 6), [Fraction("0.25")] * 8)
    assert np.array_equal(chosen_EU[:4], chosen_EU[4:])


# Rare types


def test_boosts_are_frequency_to_the_power_over_their_mean_rounded_and_bounded() -> None:
    """By hand: a = 0.5, counts 64, 16, 4, 1 of 85 tokens; mean of f^-0.5 is 15/85."""
    levels = levels_of_types(np.array([64, 16, 4, 1, 0]), rare_boost=0.5)
    exact = [85 / 15 / 8, 85 / 15 / 4, 85 / 15 / 2, 85 / 15]  # 0.708, 1.417, 2.83, 5.67 (over 4)
    assert (levels + LOWEST).tolist() == [round(2 * math.log2(b)) for b in exact[:3]] + [4, 4]
    assert BOOSTS_L[levels].tolist() == pytest.approx([2**-0.5, 2**0.5, 2**1.5, 4, 4])


@settings(max_examples=50)
@given(
    tokens=st.lists(
        st.lists(st.integers(0, 50), min_size=7, max_size=7).filter(any), min_size=1, max_size=5
    ),
    share=st.floats(0.02, 0.95),
)
def test_boosts_keep_the_share_and_hide_nothing_too_often(
    tokens: list[list[int]], share: float
) -> None:
    tokens_NL = np.array(tokens, np.float64)
    found_NL = speeds(tokens_NL, largest_share=share)
    np.testing.assert_allclose((tokens_NL * found_NL).sum(1), tokens_NL.sum(1), rtol=1e-9)
    assert (share * found_NL[tokens_NL > 0] <= max(share, 0.5) * (1 + 1e-9)).all()
    for row, speed in zip(tokens_NL, found_NL, strict=True):
        there = np.flatnonzero(row)
        assert (np.diff(speed[there]) >= -1e-9).all()  # a rarer type never less often


def test_boosted_chances_are_as_documented_and_all_is_covered() -> None:
    """Chance of level l: share * b_l / (mean of b over the tokens); 30 levels 0, 10 of level 4."""
    speed_L = speeds(np.array([[30.0, 0, 0, 0, 0, 0, 10.0]]), largest_share=0.15)[0]
    mean = (30 * 0.5 + 10 * 4) / 40
    capped = 0.5 / 0.15  # 4 / mean is less
    assert speed_L[0] == pytest.approx(0.5 / mean)
    assert speed_L[6] == pytest.approx(4 / mean)
    assert 4 / mean < capped
    queues = queues_of([[1] * 30, [1] * 10] * 2000, 1, [speed_L[0], speed_L[6]] * 2000)
    chosen_EU = history(queues, [Fraction("0.15")] * 14)
    chances = chosen_EU.reshape(14, 2000, 40).mean((0, 1))
    assert chances[:30].mean() == pytest.approx(0.15 * 0.5 / mean, abs=0.003)
    assert chances[30:].mean() == pytest.approx(0.15 * 4 / mean, abs=0.005)
    within = math.ceil(1 / (0.15 * speed_L[0]))
    assert within > 14
    assert history(queues_of([[1] * 30], 4, [speed_L[0]]), [Fraction("0.15")] * within).any(0).all()


# The stream


def stream_of(
    corpus: ListCorpus, masking: MaskingConfig, *, tokens_per_pack: int = 256
) -> PretrainStream:
    return PretrainStream(
        corpus,
        packing=PackingConfig(tokens_per_pack=tokens_per_pack, max_sequence_tokens=64),
        masking=masking,
        tokens_per_step=512,
        seed=3,
    )


def predicted_by_steps(stream: PretrainStream, corpus: ListCorpus, epoch: int) -> list[list[bool]]:
    """For each token of each document whether the steps of an epoch predict it."""
    found = [[False] * int(n) for n in corpus.lengths(0, corpus.num_documents)]
    per_epoch = stream.steps_in_epoch(epoch)
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        for batch, (documents, firsts) in zip(
            stream.step(step), stream.origins_of(step), strict=True
        ):
            starts = batch.inputs.starts_N1.numpy()
            for position, target in zip(
                batch.positions_M.tolist(), batch.targets_M.tolist(), strict=True
            ):
                sequence = int(np.searchsorted(starts, position, side="right")) - 1
                document = int(documents[sequence])
                place = int(firsts[sequence]) + position - int(starts[sequence]) - 1
                assert corpus.document(document)[place] == target
                assert not found[document][place]
                found[document][place] = True
    return found


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_the_steps_of_a_stream_cover_documents_and_their_cut_parts(unit: str) -> None:
    corpus = ListCorpus([1, 2, 17, 63, 200, 0, 131, *skewed_lengths(20)])
    stream = stream_of(corpus, MaskingConfig(unit=unit))  # type: ignore[arg-type]
    epochs = [predicted_by_steps(stream, corpus, e) for e in range(7)]  # ceil(1 / 0.15)
    counts = [np.array([e[d] for e in epochs]).sum(0) for d in range(corpus.num_documents)]
    assert all(set(c.tolist()) <= {1, 2} for c in counts)
    other = stream_of(corpus, MaskingConfig(unit=unit), tokens_per_pack=128)  # type: ignore[arg-type]
    for document in range(corpus.num_documents):
        for epoch in (0, 6):
            expected = epochs[epoch][document]
            assert other.predicted(document, epoch=epoch).tolist() == expected


def test_independent_epochs_leave_what_chance_leaves() -> None:
    corpus = ListCorpus([500] * 40)
    stream = stream_of(corpus, MaskingConfig(schedule="independent", unit="word"))
    hit = np.array(
        [np.concatenate([stream.predicted(d, epoch=e) for d in range(40)]) for e in range(7)]
    )
    assert 1 - float(hit.any(0).mean()) == pytest.approx(0.85**7, abs=0.02)


def test_two_stages_keep_the_promise_over_their_seam() -> None:
    masking = MaskingConfig(share=0.3, share_schedule="two_stage", share_end=0.15, share_epochs=2)
    assert [float(masking.share_in(e)) for e in range(4)] == [0.3, 0.3, 0.15, 0.15]
    stream = stream_of(ListCorpus([300]), masking)
    hit = np.array([stream.predicted(0, epoch=e) for e in range(8)])
    assert hit[:5].sum(1) == pytest.approx([90, 90, 45, 45, 45], abs=6)  # 6 pieces, under 1 each
    assert hit[:5].any(0).all()  # 0.3 + 0.3 + 0.15 + 0.15 + 0.15 > 1
    assert hit[1:7].any(0).all()
    linear = MaskingConfig(share=0.3, share_schedule="linear", share_end=0.1, share_epochs=4)
    assert [float(linear.share_in(e)) for e in range(6)] == [0.3, 0.25, 0.2, 0.15, 0.1, 0.1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"share_schedule": "linear"}, "share_end and share_epochs"),
        ({"share_end": 0.1}, "share_end and share_epochs"),
        (
            {"share_schedule": "linear", "share_end": 0.1, "share_epochs": 0},
            "share_epochs is 0",
        ),
        ({"share_end": 1.0}, "share_end is 1.0"),
        ({"rare_boost": -1.0}, "rare_boost is -1.0"),
        ({"unit": "letter"}, "unit is 'letter'; it must be one of token, word, span"),
    ],
)
def test_halves_and_values_out_of_range_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MaskingConfig(**values)  # type: ignore[arg-type]
