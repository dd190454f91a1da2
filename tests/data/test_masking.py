"""What is hidden: an exact share, never a special token, 80/10/10, told by the generator alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.batch import MaskedBatch, PackedBatch, pack
from bertsmith.data.config import MaskingConfig
from bertsmith.data.masking import mask_pack
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
        MaskingConfig(**values)
