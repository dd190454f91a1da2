"""Steps follow from seed and step, an epoch holds every token once, validation stands still."""

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.masking import mask_pack
from bertsmith.data.packing import longest_first, plan_packs
from bertsmith.data.pieces import Pieces
from bertsmith.data.stream import PretrainStream
from bertsmith.errors import UserError
from small_corpus import ListCorpus, skewed_lengths

PACKING = PackingConfig(tokens_per_pack=256, max_sequence_tokens=64)


CLASSIC = MaskingConfig(schedule="independent")


def stream_of(
    corpus: ListCorpus,
    *,
    seed: int = 0,
    tokens_per_step: int = 512,
    masking: MaskingConfig = MaskingConfig(),  # noqa: B008 - frozen
) -> PretrainStream:
    return PretrainStream(
        corpus,
        packing=PACKING,
        masking=masking,
        tokens_per_step=tokens_per_step,
        seed=seed,
    )


def equal(left: MaskedBatch, right: MaskedBatch) -> bool:
    """Whether two packs are the same in every tensor."""
    return all(
        torch.equal(getattr(left.inputs, f.name), getattr(right.inputs, f.name))
        for f in fields(left.inputs)
        if f.name not in ("longest", "first_row")
    ) and torch.equal(left.positions_M, right.positions_M)


def originals(batch: MaskedBatch) -> torch.Tensor:
    """The tokens before any was hidden."""
    return batch.inputs.input_ids_T.index_copy(0, batch.positions_M, batch.targets_M)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=60).filter(any),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 3),
)
def test_an_epoch_holds_every_token_once_whatever_the_steps(
    lengths: list[int], seed: int, epoch: int
) -> None:
    corpus = ListCorpus(lengths)
    stream = stream_of(corpus, seed=seed)
    per_epoch = stream.steps_in_epoch(epoch)
    seen: Counter[int] = Counter()
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        assert stream.epoch_of(step) == (epoch, step - epoch * per_epoch)
        packs = stream.step(step)
        assert 1 <= len(packs) <= stream.packs_per_step
        for pack, documents in zip(packs, stream.documents_of(step), strict=True):
            assert pack.num_tokens <= PACKING.tokens_per_pack
            assert len(documents) == pack.inputs.num_sequences
            lengths_N = pack.inputs.starts_N1.diff()
            assert int(lengths_N.max()) == pack.inputs.longest == int(lengths_N[0])
            seen.update(originals(pack).tolist())
    wanted = Counter(i for d in range(len(lengths)) for i in corpus.document(d).tolist())
    special = {2: seen[2], 3: seen[3]}
    assert special[2] == special[3]
    assert seen - Counter(special) == wanted
    assert sum(seen.values()) == stream.num_tokens_per_epoch


def test_a_step_is_the_same_whoever_asks_in_whatever_order() -> None:
    corpus = ListCorpus(skewed_lengths(400))
    forward, jumping = stream_of(corpus), stream_of(corpus)
    per_epoch = forward.steps_in_epoch(0)
    numbers = [0, 1, per_epoch - 1, per_epoch, per_epoch + 1, 3 * per_epoch + 2]
    in_order = {n: forward.step(n) for n in numbers}
    for number in (numbers[i] for i in (5, 0, 3, 2, 4, 1)):
        packs = jumping.step(number)
        assert len(packs) == len(in_order[number])
        assert all(equal(a, b) for a, b in zip(packs, in_order[number], strict=True))


def test_epochs_and_seeds_change_order_company_and_masks() -> None:
    corpus = ListCorpus(skewed_lengths(400))
    stream = stream_of(corpus)
    base = stream.step(0)[0]
    for other in (
        stream.step(stream.steps_in_epoch(0))[0],
        stream_of(corpus, seed=1).step(0)[0],
    ):
        assert not torch.equal(originals(base)[:200], originals(other)[:200])
    one_pack = ListCorpus([60])  # nothing to reorder: only the masks can differ
    masks = [stream_of(one_pack).step(epoch)[0].positions_M for epoch in range(6)]
    assert len({tuple(m.tolist()) for m in masks}) == 6


def test_no_two_tokens_of_a_step_have_the_same_row_of_dropout() -> None:
    packs = stream_of(ListCorpus(skewed_lengths(400)), tokens_per_step=1024).step(1)
    assert len(packs) > 2
    for left, right in pairwise(packs):
        assert left.inputs.first_row + left.num_tokens <= right.inputs.first_row


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=60).filter(any),
    packs_per_step=st.integers(1, 9),
    num_ranks=st.integers(1, 7),
    data=st.data(),
)
def test_the_shares_of_the_ranks_are_the_step(
    lengths: list[int], packs_per_step: int, num_ranks: int, data: st.DataObject
) -> None:
    stream = stream_of(ListCorpus(lengths), tokens_per_step=256 * packs_per_step)
    last = stream.steps_in_epoch(0) - 1
    step = data.draw(st.sampled_from([last, 3 * (last + 1) - 1]) | st.integers(0, 3 * last + 2))
    whole = stream.step(step)
    shares = [stream.share(step, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    real: dict[int, MaskedBatch] = {}
    for rank, share in enumerate(shares):
        assert share.num_packs == len(whole)
        assert len(share.packs) == -(-len(whole) // num_ranks)
        assert list(share.numbers) == list(range(rank, len(whole), num_ranks))
        real |= dict(zip(share.numbers, share.packs, strict=False))
        for filler in share.packs[len(share.numbers) :]:
            assert filler.inputs.input_ids_T.tolist() == [2, 3]  # [CLS] [SEP]
            assert filler.inputs.starts_N1.tolist() == [0, 2]
            assert filler.inputs.first_row >= len(whole) << 32
            assert (filler.num_targets, filler.num_tokens, filler.inputs.longest) == (0, 2, 2)
    assert sorted(real) == list(range(len(whole)))
    for number, expected in enumerate(whole):
        assert equal(real[number], expected)
        assert torch.equal(real[number].targets_M, expected.targets_M)
        assert real[number].inputs.first_row == expected.inputs.first_row == number << 32
        assert real[number].inputs.longest == expected.inputs.longest


def test_a_filler_is_of_the_types_of_a_real_pack() -> None:
    stream = stream_of(ListCorpus([60]))
    (real,), (filler,) = (stream.share(0, rank=r, num_ranks=2).packs for r in (0, 1))
    for name in ("input_ids_T", "position_ids_T", "segment_ids_T", "starts_N1"):
        assert getattr(filler.inputs, name).dtype == getattr(real.inputs, name).dtype
    assert filler.positions_M.dtype == filler.targets_M.dtype == torch.int64
    assert filler.inputs.position_ids_T.tolist() == [0, 1]
    assert filler.inputs.segment_ids_T.tolist() == [0, 0]


def test_a_rank_reads_the_documents_of_its_own_packs_alone() -> None:
    class Recording(ListCorpus):
        def document(self, index: int, /) -> NDArray[np.int64]:
            read.append(index)
            return super().document(index)

    read: list[int] = []
    stream = stream_of(Recording(skewed_lengths(400)), tokens_per_step=256 * 5)
    stream.share(3, rank=1, num_ranks=3)
    documents = stream.documents_of(3)
    assert read == documents[1] + documents[4]


def test_random_numbers_have_the_keys_they_always_had() -> None:
    """A corpus of one block: what a seed gives is part of the format of a checkpoint."""

    def rng(*key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))

    corpus = ListCorpus(skewed_lengths(400))
    stream = stream_of(corpus, seed=7, masking=CLASSIC)
    pieces = Pieces(corpus, max_sequence_tokens=64)
    shapes = plan_packs(pieces.lengths_S, capacity_tokens=256)
    for epoch in (0, 2):
        draws = rng(7, epoch, 0, 0)
        piece_at_S = longest_first(pieces.lengths_S, draws)
        packs_P = draws.permutation(shapes.num_packs)
        for step in (0, 5):
            found = stream.step(epoch * stream.steps_in_epoch(0) + step)
            for pack, batch in zip((2 * step, 2 * step + 1), found, strict=True):
                ids_T, _ = pieces.lay(piece_at_S[shapes.places_of(int(packs_P[pack]))])
                assert originals(batch).tolist() == ids_T.tolist()
                expected = mask_pack(
                    replace(batch.inputs, input_ids_T=torch.from_numpy(ids_T)),
                    config=CLASSIC,
                    vocab=corpus.vocab,
                    rng=rng(7, epoch, pack, 1),
                )
                assert equal(batch, expected)


def test_masks_do_not_depend_on_how_many_packs_a_step_has() -> None:
    corpus = ListCorpus(skewed_lengths(400))
    one, two = stream_of(corpus, tokens_per_step=256), stream_of(corpus, tokens_per_step=512)
    assert (one.packs_per_step, two.packs_per_step) == (1, 2)
    assert all(
        equal(a, b) for a, b in zip([one.step(0)[0], one.step(1)[0]], two.step(0), strict=True)
    )


def test_no_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="no tokens"):
        stream_of(ListCorpus([0, 0]))


def test_a_fault_while_a_pack_is_made_names_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(ListCorpus(skewed_lengths(400)), masking=CLASSIC)
    wanted = sorted(set(stream.documents_of(3)[1]))

    def fail(pack: PackedBatch, **settings: Any) -> MaskedBatch:
        if pack.first_row >> 32 == 1:
            raise ValueError("ours")
        return mask_pack(pack, **settings)

    monkeypatch.setattr("bertsmith.data.stream.mask_pack", fail)
    with pytest.raises(ValueError, match="ours") as caught:
        stream.step(3)
    assert caught.value.__notes__ == [f"while reading documents {wanted} of None"]
