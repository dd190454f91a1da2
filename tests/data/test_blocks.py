"""Blocks hold every document once, and each has some from all over the corpus."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data import blocks as module
from bertsmith.data.blocks import EpochLayout, cut_blocks
from small_corpus import ListCorpus


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=80),
    block_tokens=st.integers(1, 400),
    runs=st.integers(1, 6),
)
def test_every_document_is_in_one_block_and_no_block_is_left_empty(
    lengths: list[int], block_tokens: int, runs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ONE_BLOCK_TOKENS", 0)
        patch.setattr(module, "BLOCK_TOKENS", block_tokens)
        patch.setattr(module, "RUNS_OF_A_BLOCK", runs)
        blocks = cut_blocks(ListCorpus(lengths))
    assert blocks.num_blocks == max(min(-(-sum(lengths) // block_tokens), len(lengths)), 1)
    held = [[d for run in blocks.runs_of(b) for d in run] for b in range(blocks.num_blocks)]
    assert Counter(d for block in held for d in block) == Counter(range(len(lengths)))
    assert all(block == sorted(block) and block for block in held)
    sizes = [len(block) for block in held]
    assert max(sizes) - min(sizes) <= blocks.runs_of_a_block


def test_a_block_is_taken_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BLOCK_TOKENS", 239)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 120)
    monkeypatch.setattr(module, "RUNS_OF_A_BLOCK", 3)
    blocks = cut_blocks(ListCorpus([10] * 24))  # 240 tokens: two blocks of three runs of four
    assert blocks.runs_of(0) == [range(4), range(8, 12), range(16, 20)]
    assert blocks.runs_of(1) == [range(4, 8), range(12, 16), range(20, 24)]


def test_what_fits_one_block_is_one_block_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BLOCK_TOKENS", 240)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 100)
    assert cut_blocks(ListCorpus([10] * 24)).runs_of(0) == [range(24)]
    assert cut_blocks(ListCorpus([10] * 24 + [1])).num_blocks == 3


def test_documents_larger_than_a_block_make_no_more_blocks_than_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ONE_BLOCK_TOKENS", 10)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 10)
    blocks = cut_blocks(ListCorpus([1000, 1000]))
    assert [blocks.runs_of(b) for b in range(blocks.num_blocks)] == [[range(1)], [range(1, 2)]]


def test_blocks_abreast_give_a_pack_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCKS_ABREAST", 3)
    layout = EpochLayout(np.array([4, 0, 2, 3, 1]), np.array([2, 1, 3, 0, 2]))
    assert [layout.find(pack) for pack in range(8)] == [
        (4, 0),
        (0, 0),
        (2, 0),
        (4, 1),
        (2, 1),
        (2, 2),
        (1, 0),  # a new group, where block 3 is empty
        (1, 1),
    ]


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=30), abreast=st.integers(1, 9))
def test_a_layout_is_what_taking_turns_gives(counts: list[int], abreast: int) -> None:
    block_B = np.random.default_rng(0).permutation(len(counts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCKS_ABREAST", abreast)
        layout = EpochLayout(block_B, np.array(counts)[block_B])
        found = [layout.find(pack) for pack in range(sum(counts))]
    expected = []
    for first in range(0, len(counts), abreast):
        group = block_B[first : first + abreast].tolist()
        for turn in range(9):
            expected += [(block, turn) for block in group if counts[block] > turn]
    assert found == expected
