"""What is hidden: an exact share, never a special token, 80/10/10, told by the generator alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.batch import MaskedBatch, PackedBatch, pack
from bertsmith.data.config import MaskingConfig, MaskingUnit
from bertsmith.data.keyed_random import child_keys, key_of
from bertsmith.data.mask_units import MOST_TOKENS_IN_WORD, find_units
from bertsmith.data.masking import Masker, PieceText, mask_pack
from small_corpus import VOCAB


def pack_of(sequences: list[list[int]]) -> PackedBatch:
    return pack([torch.tensor(s) for s in sequences])


def masked(
    batch: PackedBatch, config: MaskingConfig | None = None, *, seed: int = 0
) -> MaskedBatch:
    return mask_pack(
        batch, config=config or MaskingConfig(), vocab=VOCAB, rng=np.random.default_rng(seed)
    )


@given(
    sequences=st.lists(
        st.lists(st.integers(0, VOCAB.size - 1), min_size=1, max_size=40), min_size=1, max_size=8
    ),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_the_share_is_exact_and_everything_else_stands(
    sequences: list[list[int]], share: float, seed: int
) -> None:
    batch = pack_of(sequences)
    before_T = batch.input_ids_T.clone()
    hidden = masked(batch, MaskingConfig(share=share), seed=seed)
    assert torch.equal(batch.input_ids_T, before_T)  # the input is left alone
    num_ordinary = sum(i not in VOCAB.special_ids for s in sequences for i in s)
    wanted = max(round(share * num_ordinary), 1) if num_ordinary else 0
    assert hidden.num_targets == wanted
    positions = hidden.positions_M.tolist()
    assert positions == sorted(set(positions))
    assert torch.equal(hidden.targets_M, before_T[hidden.positions_M])
    assert not set(hidden.targets_M.tolist()) & set(VOCAB.special_ids)
    untouched = torch.ones(len(before_T), dtype=torch.bool)
    untouched[hidden.positions_M] = False
    assert torch.equal(hidden.inputs.input_ids_T[untouched], before_T[untouched])


def test_of_the_hidden_80_percent_are_mask_10_noise_and_10_stay() -> None:
    rng = np.random.default_rng(1)
    batch = pack_of([rng.integers(5, VOCAB.size, 500).tolist() for _ in range(400)])
    hidden = masked(batch)
    now_M, was_M = hidden.inputs.input_ids_T[hidden.positions_M], hidden.targets_M
    count = len(was_M)
    assert count == 30_000
    shares = {
        "mask": float((now_M == VOCAB.mask_id).double().mean()),
        "stay": float((now_M == was_M).double().mean()),
        "noise": float(((now_M != VOCAB.mask_id) & (now_M != was_M)).double().mean()),
    }
    for name, wanted in (("mask", 0.8), ("stay", 0.1), ("noise", 0.1)):
        assert abs(shares[name] - wanted) < 4 * (wanted * (1 - wanted) / count) ** 0.5, name
    noise = now_M[(now_M != VOCAB.mask_id) & (now_M != was_M)]
    assert int(noise.min()) > max(VOCAB.special_ids)
    counts = np.bincount(noise.numpy() // 200, minlength=5)  # noise comes from the whole table
    assert counts.min() > 0.85 * counts.max() * 195 / 200


def test_every_position_is_hidden_as_often() -> None:
    batch = pack_of([[2, *range(10, 30), 3]])
    config = MaskingConfig(share=0.2)
    hits = torch.zeros(22)
    for seed in range(3000):
        hits[masked(batch, config, seed=seed).positions_M] += 1
    assert hits[0] == hits[21] == 0
    expected = 3000 * 0.2
    assert float((hits[1:21] - expected).abs().max()) < 4.5 * (expected * 0.8) ** 0.5


def test_the_same_generator_state_hides_the_same() -> None:
    batch = pack_of([[2, *range(10, 200), 3]])
    first, again, other = (masked(batch, seed=s) for s in (4, 4, 5))
    assert torch.equal(first.positions_M, again.positions_M)
    assert torch.equal(first.inputs.input_ids_T, again.inputs.input_ids_T)
    assert not torch.equal(first.positions_M, other.positions_M)


@pytest.mark.parametrize(
    "values",
    [{"share": 0.0}, {"share": 1.0}, {"hide_share": -0.1}, {"hide_share": 0.8, "noise_share": 0.3}],
)
def test_shares_that_hide_nothing_or_too_much_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share"):
        MaskingConfig(**values)  # type: ignore[arg-type]


# Units of documents


def text_of(pieces: list[list[int]], word_starts: list[int] | None = None) -> PieceText:
    """Pieces of documents 0, 1, ..., and where words begin (None: at every token)."""
    lengths = [len(p) for p in pieces]
    ids_T = np.array([i for p in pieces for i in p], np.int64)
    starts_T = np.ones(len(ids_T), np.bool_)
    if word_starts is not None:
        starts_T = np.isin(np.arange(len(ids_T)), word_starts)
    return PieceText(
        ids_T=ids_T,
        starts_N1=np.cumsum([0, *lengths]),
        word_starts_T=starts_T,
        documents_N=np.arange(len(pieces)),
        numbers_N=np.zeros(len(pieces), np.int64),
    )


def hidden_by(config: MaskingConfig, text: PieceText, *, epoch: int = 0) -> MaskedBatch:
    batch = pack([torch.from_numpy(s) for s in np.split(text.ids_T, text.starts_N1[1:-1])])
    return Masker(config, VOCAB, seed=5).mask(batch, text, epoch=epoch)


def many_words() -> PieceText:
    """2,000 pieces of ten words of three tokens."""
    rng = np.random.default_rng(2)
    pieces = [[2, *rng.integers(5, VOCAB.size, 30).tolist(), 3] for _ in range(2000)]
    return text_of(pieces, [32 * p + 1 + 3 * w for p in range(2000) for w in range(10)])


@pytest.mark.parametrize("unit", ["word", "span"])
@pytest.mark.parametrize("fate", ["unit", "token"])
def test_units_are_whole_and_80_10_10_is_decided_for_each_or_for_each_token(
    unit: MaskingUnit, fate: str
) -> None:
    text = many_words()
    config = MaskingConfig(unit=unit, fate=fate, share=0.3)  # type: ignore[arg-type]
    batch = hidden_by(config, text)
    places_M = batch.positions_M.numpy()
    words_M = (places_M % 32 - 1) // 3 + places_M // 32 * 10
    assert (np.unique(words_M, return_counts=True)[1] == 3).all()
    assert len(places_M) == pytest.approx(0.3 * 60_000, rel=0.02)
    is_mask = (batch.inputs.input_ids_T[batch.positions_M] == VOCAB.mask_id).numpy()
    assert is_mask.mean() == pytest.approx(0.8, abs=0.03)  # 5 deviations of the fewest units, 1,600
    of_word = is_mask.reshape(-1, 3).sum(1)
    alike = float(np.isin(of_word, [0, 3]).mean())
    assert alike == (1.0 if fate == "unit" else pytest.approx(0.8**3 + 0.2**3, abs=0.04))
    was, now = batch.targets_M, batch.inputs.input_ids_T[batch.positions_M]
    assert float((was == now).double().mean()) == pytest.approx(0.1, abs=0.03)
    assert not set(now.tolist()) & {0, 1, 2, 3}


def test_spans_have_the_lengths_of_the_paper() -> None:
    """Joshi et al. 2020: geometric, p = 0.2, at most 10: a mean of 3.8 words."""
    count = 400_000
    units = find_units(
        "span",
        positions_M=np.arange(count),
        sequences_M=np.zeros(count, np.int64),
        word_starts_T=np.ones(count, np.bool_),
        keys_N=key_of(3),
    )
    lengths = units.tokens_U[:-1]
    chances = 0.2 * 0.8 ** np.arange(10)
    chances /= chances.sum()
    assert lengths.mean() == pytest.approx(float(chances @ np.arange(1, 11)), abs=0.03)
    found = np.bincount(lengths, minlength=11)[1:] / len(lengths)
    assert np.abs(found - chances).max() < 0.006
    assert float(chances @ np.arange(1, 11)) == pytest.approx(3.8, abs=0.01)


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    unit=st.sampled_from(["token", "word", "span"]),
    data=st.data(),
)
def test_units_part_the_ordinary_tokens_of_each_piece(
    lengths: list[int], unit: MaskingUnit, data: st.DataObject
) -> None:
    ids = st.integers(0, 9)  # half of them special
    pieces = [[2, *data.draw(st.lists(ids, min_size=n, max_size=n)), 3] for n in lengths]
    text = text_of(pieces, data.draw(st.lists(st.integers(0, 400), max_size=60)))
    positions_M = np.flatnonzero(text.ids_T > 4)
    sequences_M = np.searchsorted(text.starts_N1, positions_M, side="right") - 1
    units = find_units(
        unit,
        positions_M=positions_M,
        sequences_M=sequences_M,
        word_starts_T=text.word_starts_T,
        keys_N=child_keys(key_of(1), np.arange(len(pieces))),
    )
    assert int(units.tokens_U.sum()) == len(positions_M)
    assert text.word_starts_T is not None
    for first, count, sequence in zip(*units, strict=True):
        inside = positions_M[first : first + count]
        assert inside.tolist() == list(range(inside[0], inside[0] + count))
        assert set(sequences_M[first : first + count].tolist()) == {sequence}
        if unit == "word":
            assert count <= MOST_TOKENS_IN_WORD
            assert not text.word_starts_T[inside[1:]].any()


def test_documents_of_one_token_take_their_turn_and_those_of_none_hide_nothing() -> None:
    text = text_of([[2, 7, 3], [2, 1, 3], [2, 3]] * 300)
    for unit in ("token", "word", "span"):
        epochs = [
            hidden_by(MaskingConfig(unit=unit), text, epoch=e).positions_M.tolist()
            for e in range(7)
        ]
        counts = np.bincount(np.concatenate(epochs).astype(int), minlength=8 * 300)
        assert set(counts[1::8].tolist()) == {1, 2}  # seven epochs at 15 % are 1.05 turns
        assert int(counts.sum()) == int(counts[1::8].sum())
        assert all(len(e) == pytest.approx(45, abs=30) for e in epochs)  # not all at once
    nothing = hidden_by(MaskingConfig(), text_of([[2, 1, 3], [2, 3]]))
    assert nothing.num_targets == 0
