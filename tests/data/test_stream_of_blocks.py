"""A corpus of many blocks: the order is that of a scan, and a step reads its own blocks alone."""

from collections import Counter
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.data import blocks as module
from bertsmith.data.blocks import Blocks, cut_blocks
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.packing import longest_first, plan_packs
from bertsmith.data.pieces import Pieces
from bertsmith.data.stream import PretrainStream
from small_corpus import ListCorpus, skewed_lengths

PACKING = PackingConfig(tokens_per_pack=256, max_sequence_tokens=64)
BLOCKS_ORDER, ORDER = 4, 0  # the purposes of the keys of random numbers


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BLOCK_TOKENS", 1500)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 1500)
    monkeypatch.setattr(module, "BLOCKS_ABREAST", 3)
    monkeypatch.setattr(module, "RUNS_OF_A_BLOCK", 4)


def stream_of(corpus: ListCorpus, *, seed: int = 0, packs_per_step: int = 4) -> PretrainStream:
    return PretrainStream(
        corpus,
        packing=PACKING,
        masking=MaskingConfig(),
        tokens_per_step=256 * packs_per_step,
        seed=seed,
    )


def block_of_document(blocks: Blocks) -> dict[int, int]:
    return {d: b for b in range(blocks.num_blocks) for run in blocks.runs_of(b) for d in run}


def rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


def scanned(corpus: ListCorpus, *, seed: int, epoch: int) -> list[list[int]]:
    """The documents of every pack of an epoch, from planning the blocks one after another."""
    blocks = cut_blocks(corpus)
    packs_of: list[list[list[int]]] = []
    for block in rng(seed, epoch, 0, BLOCKS_ORDER).permutation(blocks.num_blocks).tolist():
        packs_of.append([])
        documents = np.array([d for run in blocks.runs_of(block) for d in run])
        alone = ListCorpus([int(corpus.lengths(d, d + 1)[0]) for d in documents.tolist()])
        pieces = Pieces(alone, max_sequence_tokens=64)
        shapes = plan_packs(pieces.lengths_S, capacity_tokens=256)
        draws = rng(seed, epoch, block, ORDER)
        piece_at_S = longest_first(pieces.lengths_S, draws)
        for pack in draws.permutation(shapes.num_packs).tolist():
            places = pieces.documents_of(piece_at_S[shapes.places_of(pack)])
            packs_of[-1].append(documents[places].tolist())
    turns = (zip_longest(*packs_of[first : first + 3]) for first in range(0, len(packs_of), 3))
    return [pack for group in turns for turn in group for pack in turn if pack is not None]


def test_the_order_is_that_of_a_scan_also_where_a_step_straddles_blocks() -> None:
    corpus = ListCorpus(skewed_lengths(400))
    stream = stream_of(corpus, seed=5)
    block_of = block_of_document(cut_blocks(corpus))
    per_epoch = stream.steps_in_epoch(0)
    num_straddling = 0
    for epoch in (0, 1, 7):
        packs = scanned(corpus, seed=5, epoch=epoch)
        assert per_epoch == -(-len(packs) // 4)
        for step in range(per_epoch):
            found = stream.documents_of(epoch * per_epoch + step)
            assert found == packs[4 * step : 4 * step + 4]
            blocks = {block_of[d] for pack in found for d in pack}
            num_straddling += len(blocks) > 1
    assert num_straddling > 10


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=60).filter(any),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 3),
    block_tokens=st.integers(20, 1000),
)
def test_an_epoch_holds_every_token_once_whatever_the_blocks(
    lengths: list[int], seed: int, epoch: int, block_tokens: int
) -> None:
    corpus = ListCorpus(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ONE_BLOCK_TOKENS", block_tokens)
        patch.setattr(module, "BLOCK_TOKENS", block_tokens)
        stream = stream_of(corpus, seed=seed, packs_per_step=3)
    per_epoch = stream.steps_in_epoch(epoch)
    seen: Counter[int] = Counter()
    num_tokens = num_packs = 0
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        packs = stream.step(step)
        assert len(packs) == 3 or step == (epoch + 1) * per_epoch - 1
        for pack in packs:
            ids_T = pack.inputs.input_ids_T.index_copy(0, pack.positions_M, pack.targets_M)
            seen.update(ids_T[ids_T > 4].tolist())
        num_tokens += sum(pack.num_tokens for pack in packs)
        num_packs += len(packs)
    assert seen == Counter(i for d in range(len(lengths)) for i in corpus.document(d).tolist())
    assert num_tokens == stream.num_tokens_per_epoch
    assert stream.efficiency == pytest.approx(num_tokens / (256 * num_packs))


def test_every_epoch_has_the_blocks_in_an_order_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = ListCorpus(skewed_lengths(400))
    monkeypatch.setattr(module, "BLOCKS_ABREAST", 1)
    stream = stream_of(corpus)
    blocks = cut_blocks(corpus)
    block_of = block_of_document(blocks)
    per_epoch = stream.steps_in_epoch(0)
    orders = []
    for epoch in range(3):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        packs = [pack for step in steps for pack in stream.documents_of(step)]
        assert all(len({block_of[d] for d in pack}) == 1 for pack in packs)
        # A block's packs come one after another, so each block appears once.
        orders.append(list(dict.fromkeys(block_of[pack[0]] for pack in packs)))
        changes = sum(block_of[a[0]] != block_of[b[0]] for a, b in pairwise(packs))
        assert changes == blocks.num_blocks - 1 > 10
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(blocks.num_blocks)) for order in orders)


def test_a_rank_that_starts_far_out_reads_the_blocks_of_its_step_alone(tmp_path: Path) -> None:
    lengths = skewed_lengths(400)
    known = ListCorpus(lengths, folder=tmp_path)
    walked = stream_of(known)
    far = 1000 * walked.steps_in_epoch(0) + 7
    corpus = ListCorpus(lengths, folder=tmp_path)
    stream = stream_of(corpus)
    assert corpus.asked == []
    share = stream.share(far, rank=1, num_ranks=4)
    blocks = cut_blocks(corpus)
    block_of = block_of_document(blocks)
    needed = {block_of[d] for d in walked.documents_of(far)[1]}
    assert len(needed) == 1
    assert corpus.asked == [run for b in needed for run in blocks.runs_of(b)]
    expected = walked.step(far)[1]
    assert share.packs[0].inputs.input_ids_T.tolist() == expected.inputs.input_ids_T.tolist()


def test_a_block_is_planned_once_while_steps_walk_through_it(tmp_path: Path) -> None:
    lengths = skewed_lengths(400)
    stream_of(ListCorpus(lengths, folder=tmp_path))
    corpus = ListCorpus(lengths, folder=tmp_path)
    stream = stream_of(corpus)
    for step in range(stream.steps_in_epoch(0)):
        stream.step(step)
    blocks = cut_blocks(corpus)
    every_run = [run for b in range(blocks.num_blocks) for run in blocks.runs_of(b)]
    assert Counter(corpus.asked) == Counter(every_run)


def test_ranks_that_divide_by_the_blocks_abreast_plan_a_block_of_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCKS_ABREAST", 4)
    lengths = [20] * 600  # eight blocks of seven packs: all run out in the same turn
    whole = stream_of(ListCorpus(lengths, folder=tmp_path), packs_per_step=8)
    num_blocks = cut_blocks(ListCorpus(lengths)).num_blocks
    for rank in range(8):
        corpus = ListCorpus(lengths, folder=tmp_path)
        stream = stream_of(corpus, packs_per_step=8)
        for step in range(whole.steps_in_epoch(0)):
            stream.share(step, rank=rank, num_ranks=8)
        planned = {block_of_document(cut_blocks(corpus))[run.start] for run in corpus.asked}
        assert len(planned) == 2 == num_blocks // 4


def test_some_lengths_are_those_of_one_block() -> None:
    corpus = ListCorpus(skewed_lengths(400))
    stream = stream_of(corpus)
    corpus.asked.clear()
    some = stream.some_lengths(at_most=20)
    assert 10 <= len(some) <= 20
    assert 3 <= some.min() <= some.max() <= 64
    assert len(corpus.asked) == 4
