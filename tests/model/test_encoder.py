"""The encoder's savings change nothing: rows that nobody reads, and rows that nobody asked for."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bertsmith.batch import PackedBatch, pack, unpack
from bertsmith.model import encoder as module
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, with_ghosts, with_repeats
from bertsmith.model.heads import initialize
from bertsmith.model.kernels import build

SHAPE = EncoderConfig(
    vocab_size=50,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
)


def batch_of(lengths: list[int]) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    return pack([torch.randint(5, 50, (n,), generator=generator) for n in lengths])


def new_encoder(*, drop_prob: float = 0.1) -> Encoder:
    shape = replace(SHAPE, hidden_dropout_prob=drop_prob, attention_probs_dropout_prob=drop_prob)
    encoder = Encoder(shape)
    initialize(encoder, config=shape, seed=3)
    return encoder


def outcome(
    encoder: Encoder, batch: PackedBatch, rows_M: Tensor | None, weight_MD: Tensor, seed: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and every gradient."""
    encoder.zero_grad()
    hidden = encoder(batch, dropout_seed=seed, rows_M=rows_M)
    (hidden * weight_MD).sum().backward()
    grads = {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}
    return hidden.detach(), grads


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=400))
def test_a_pack_with_ghosts_begins_with_the_pack_and_is_little_longer(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    longer = with_ghosts(batch)
    num_tokens = batch.num_tokens
    added = longer.num_tokens - num_tokens
    assert 0 <= added <= max(15, num_tokens // 64)
    assert longer.num_tokens % 16 == 0
    assert torch.equal(longer.input_ids_T[:num_tokens], batch.input_ids_T)
    assert torch.equal(longer.position_ids_T[:num_tokens], batch.position_ids_T)
    assert torch.equal(longer.starts_N1[: len(batch.starts_N1)], batch.starts_N1)
    assert int(longer.starts_N1[-1]) == longer.num_tokens
    assert longer.longest == int(longer.starts_N1.diff().max())
    assert int(longer.position_ids_T.max()) < SHAPE.max_position_embeddings


def test_packs_of_up_to_4096_tokens_have_few_sizes() -> None:
    sizes = {with_ghosts(batch_of([1] * n)).num_tokens for n in range(1, 4097, 5)}
    assert len(sizes) <= 64 + 64 + 64 + 1  # 16s up to 1,024, 16s up to 2,048, 32s up to 4,096
    assert with_ghosts(batch_of([1] * 4085)).num_tokens == 4096


@pytest.mark.parametrize("wanted", [0, 1, 15, 16, 600, 615])
def test_rows_wanted_are_rounded_up_by_repeats_of_the_last(wanted: int) -> None:
    rows_M = 3 + 2 * torch.arange(wanted)
    longer = with_repeats(rows_M)
    assert torch.equal(longer[:wanted], rows_M)
    assert len(longer) == 16 * -(-wanted // 16)
    assert bool((longer[wanted:] == 3 + 2 * (wanted - 1)).all())


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_repeats_change_no_hidden_state_and_no_gradient(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    encoder, batch = new_encoder(), batch_of([16, 9, 9, 3, 1])
    rows_M = torch.tensor([2, 17, 20, 37])  # the last is a whole sequence: 13 queries, one key
    weight_MD = torch.randn(4, 24, generator=torch.Generator().manual_seed(5))
    hidden, grads = outcome(encoder, batch, rows_M, weight_MD, 11)
    monkeypatch.setattr(module, "with_repeats", lambda rows: rows)
    plain, plain_grads = outcome(encoder, batch, rows_M, weight_MD, 11)
    assert hidden.shape == plain.shape
    torch.testing.assert_close(hidden, plain, rtol=1e-5, atol=1e-6)
    for name, expected in plain_grads.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("seed", [None, 11])
def test_ghosts_change_no_hidden_state_and_no_gradient(
    seed: int | None, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    encoder, batch = new_encoder(), batch_of([16, 9, 9, 3, 1])
    weight_TD = torch.randn(batch.num_tokens, 24, generator=torch.Generator().manual_seed(5))
    hidden, grads = outcome(encoder, batch, None, weight_TD, seed)
    monkeypatch.setattr(module, "with_ghosts", lambda batch: batch)
    plain, plain_grads = outcome(encoder, batch, None, weight_TD, seed)
    assert hidden.shape == plain.shape
    torch.testing.assert_close(hidden, plain, rtol=1e-5, atol=1e-6)
    for name, expected in plain_grads.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("seed", [None, 11])
def test_rows_asked_for_are_those_of_the_whole_and_so_are_the_gradients(
    seed: int | None, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    encoder, batch = new_encoder(), batch_of([16, 9, 9, 3, 1])
    rows_M = torch.tensor([0, 16, 17, 30, 37])
    weight_MD = torch.randn(len(rows_M), 24, generator=torch.Generator().manual_seed(5))
    weight_TD = torch.zeros(batch.num_tokens, 24).index_copy(0, rows_M, weight_MD)
    hidden, grads = outcome(encoder, batch, rows_M, weight_MD, seed)
    whole, whole_grads = outcome(encoder, batch, None, weight_TD, seed)
    torch.testing.assert_close(hidden, whole[rows_M], rtol=1e-5, atol=1e-6)
    for name, expected in whole_grads.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_a_step_loses_the_same_to_dropout_however_it_is_cut_into_packs(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    encoder, batch = new_encoder(drop_prob=0.3), batch_of([16, 9, 9, 3, 1])
    whole = encoder(batch, dropout_seed=4)
    for cut in (1, 3):  # sequences in the first pack
        middle, sequences = int(batch.starts_N1[cut]), unpack(batch.input_ids_T, batch.starts_N1)
        for start, some in ((0, sequences[:cut]), (middle, sequences[cut:])):
            part = replace(pack(some), first_row=start)
            stop = start + part.num_tokens
            hidden = encoder(part, dropout_seed=4)
            torch.testing.assert_close(hidden, whole[start:stop], rtol=1e-5, atol=1e-6)
            if start:
                other = encoder(replace(part, first_row=0), dropout_seed=4)
                assert not torch.allclose(other, whole[start:stop], atol=1e-2)


def test_no_row_asked_for_gives_none() -> None:
    encoder, batch = new_encoder(), batch_of([5, 2])
    none = encoder(batch, dropout_seed=1, rows_M=torch.zeros(0, dtype=torch.int64))
    assert none.shape == (0, 24)
