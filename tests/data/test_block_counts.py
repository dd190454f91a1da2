"""Counts are made once, noted whole, and made again where the note is not to be trusted."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data import assembly, block_counts
from bertsmith.data import blocks as module
from bertsmith.data.block_counts import COUNTS_FILE, BlockCount, count_blocks
from bertsmith.data.blocks import BlockPlan, cut_blocks, plan_block
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.shards import open_shards
from bertsmith.data.stream import PretrainStream
from bertsmith.errors import UserError
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare
from small_corpus import ListCorpus

PACKING = PackingConfig(tokens_per_pack=32, max_sequence_tokens=16)
LENGTHS = [14, 30, 6, 6, 28, 14, 14, 14]
# 126 tokens at 63 a block are two blocks; with one run each they are the halves. Sequences hold 14
# tokens and two special ones: the first half is 16, 12, 12, 12 (a document of 30 in three), 8, 8;
# the second 16, 16 (28 in two), 16, 16, 16.
COUNTS = [BlockCount(packs=3, tokens=68), BlockCount(packs=3, tokens=80)]


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BLOCK_TOKENS", 63)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 63)
    monkeypatch.setattr(module, "RUNS_OF_A_BLOCK", 1)


def counted(corpus: ListCorpus, packing: PackingConfig = PACKING) -> list[BlockCount]:
    return count_blocks(corpus, cut_blocks(corpus), packing)


def test_packs_and_tokens_of_each_block_are_counted_and_the_caller_is_told() -> None:
    corpus = ListCorpus(LENGTHS)
    told: list[tuple[int, int]] = []
    found = count_blocks(
        corpus, cut_blocks(corpus), PACKING, advance=lambda *counts: told.append(counts)
    )
    assert found == COUNTS
    assert told == [(1, 2), (2, 2)]
    assert corpus.asked == [range(4), range(4, 8)]


def test_what_is_noted_is_not_counted_again(tmp_path: Path) -> None:
    counted(ListCorpus(LENGTHS, folder=tmp_path))
    other = PackingConfig(tokens_per_pack=64, max_sequence_tokens=16)
    assert counted(ListCorpus(LENGTHS, folder=tmp_path), other) == [
        BlockCount(packs=2, tokens=68),
        BlockCount(packs=2, tokens=80),
    ]
    for packing in (PACKING, other):  # the note of one did not drop the other's
        corpus = ListCorpus(LENGTHS, folder=tmp_path)
        assert counted(corpus, packing)[0].tokens == 68
        assert corpus.asked == []
    assert [path.name for path in tmp_path.iterdir()] == [COUNTS_FILE]


def test_the_note_of_other_text_is_replaced(tmp_path: Path) -> None:
    counted(ListCorpus(LENGTHS, folder=tmp_path, fingerprint="old"))
    new = ListCorpus(LENGTHS[::-1], folder=tmp_path, fingerprint="new")
    assert counted(new) == COUNTS[::-1]
    again = ListCorpus(LENGTHS[::-1], folder=tmp_path, fingerprint="new")
    assert counted(again) == COUNTS[::-1]
    assert again.asked == []


def test_the_note_of_other_blocks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(ListCorpus(LENGTHS, folder=tmp_path))
    monkeypatch.setattr(module, "RUNS_OF_A_BLOCK", 2)
    corpus = ListCorpus(LENGTHS, folder=tmp_path)
    assert sum(count.tokens for count in counted(corpus)) == 148
    assert corpus.asked == [range(2), range(4, 6), range(2, 4), range(6, 8)]


def damaged(note: dict[str, Any]) -> list[str]:
    """What a note may have become."""
    whole = json.dumps(note)
    key = next(iter(note["counts"]))
    return [
        "",
        whole[: len(whole) // 2],
        "[]",
        "null",
        json.dumps({"of": note["of"]}),
        json.dumps(note | {"counts": [1]}),
        *(
            json.dumps(note | {"counts": {key: counts}})
            for counts in (7, [[3, 68], [3]], [[3, 68], "ab"], [[3, -1], [3, 80]], [[3.5, 1]])
        ),
    ]


@pytest.mark.parametrize("kind", range(11))
def test_a_damaged_note_is_made_again(tmp_path: Path, kind: int) -> None:
    file = tmp_path / COUNTS_FILE
    counted(ListCorpus(LENGTHS, folder=tmp_path))
    whole = file.read_text()
    file.write_text(damaged(json.loads(whole))[kind])
    assert counted(ListCorpus(LENGTHS, folder=tmp_path)) == COUNTS
    assert file.read_text() == whole


def test_where_no_note_can_be_written_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counted(ListCorpus(LENGTHS, folder=tmp_path / "none")) == COUNTS

    def read_only(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(block_counts, "write_whole", read_only)
    assert counted(ListCorpus(LENGTHS, folder=tmp_path)) == COUNTS
    assert list(tmp_path.iterdir()) == []


def test_counting_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops_at_the_second(corpus: Any, blocks: Any, block: int, *how: Any) -> BlockPlan:
        if block == 1:
            raise KeyboardInterrupt
        return plan_block(corpus, blocks, block, *how)

    monkeypatch.setattr(block_counts, "BLOCKS_A_WRITE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(block_counts, "plan_block", stops_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            counted(ListCorpus(LENGTHS, folder=tmp_path))
    corpus = ListCorpus(LENGTHS, folder=tmp_path)
    assert counted(corpus) == COUNTS
    assert corpus.asked == [range(4, 8)]


def stream_of(corpus: Any) -> PretrainStream:
    return PretrainStream(
        corpus, packing=PACKING, masking=MaskingConfig(), tokens_per_step=32, seed=0
    )


def test_a_note_that_is_whole_but_wrong_is_named(tmp_path: Path) -> None:
    stream_of(ListCorpus(LENGTHS, folder=tmp_path))
    file = tmp_path / COUNTS_FILE
    file.write_text(file.read_text().replace("[3, 68]", "[4, 68]"))
    stream = stream_of(ListCorpus(LENGTHS, folder=tmp_path))
    with pytest.raises(UserError, match=rf"{COUNTS_FILE}: block 0 has 3 packs, not 4; delete"):
        [stream.step(step) for step in range(stream.steps_in_epoch(0))]


def test_a_prepared_folder_keeps_the_note_and_stays_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "SHARD_TOKENS", 100)
    monkeypatch.setattr(assembly, "SLAB_TOKENS", 50)
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"text {n} {'of ' * (n % 9)}" for n in range(99))
    )
    config = PrepareConfig(
        input=[str(tmp_path / "text.txt")],
        output=str(tmp_path / "out"),
        vocab_size=60,
        workers=1,
    )
    prepare(config)
    corpus = open_shards(tmp_path / "out", "train")
    first, second = stream_of(corpus), stream_of(open_shards(tmp_path / "out", "train"))
    assert (tmp_path / "out" / "train" / COUNTS_FILE).exists()
    assert first.num_tokens_per_epoch == second.num_tokens_per_epoch > corpus.num_tokens
    assert first.documents_of(5) == second.documents_of(5)
    assert prepare(config).status == "up to date"
