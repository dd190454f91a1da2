"""Counts of token types, and the rule that says which are rare."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data import frequency
from bertsmith.data.frequency import BUCKETS, corpus_frequencies, frequencies
from bertsmith.data.shards import TokenCorpus, open_shards
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare
from small_corpus import VOCAB
from small_world import sentences


def bucket_of(bucket: int) -> str:
    return "none" if bucket < 0 else BUCKETS[bucket]


def test_the_first_tenth_of_the_ranks_is_frequent_and_the_last_half_rare() -> None:
    counts_V = np.zeros(1000, np.int64)
    counts_V[:5] = 10**6  # special
    counts_V[10:30] = np.arange(20, 0, -1)  # rank 1 is id 10, rank 20 is id 29
    bucket_V = frequencies(counts_V, VOCAB).bucket_V
    found = [bucket_of(b) for b in bucket_V[10:30]]
    assert found == ["frequent"] * 2 + ["middle"] * 8 + ["rare"] * 10
    assert {bucket_of(b) for b in bucket_V[:5]} == {"none"}
    assert {bucket_of(b) for b in bucket_V[30:]} == {"rare"}  # never seen


def test_equal_counts_are_ranked_by_id_and_one_type_is_frequent() -> None:
    counts_V = np.zeros(1000, np.int64)
    counts_V[[7, 900]] = 3
    bucket_V = frequencies(counts_V, VOCAB).bucket_V
    assert [bucket_of(bucket_V[i]) for i in (7, 900)] == ["frequent", "rare"]
    counts_V[900] = 0
    assert bucket_of(frequencies(counts_V, VOCAB).bucket_V[7]) == "frequent"


@pytest.fixture
def corpus(tmp_path: Path) -> TokenCorpus:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(text for text, _ in sentences(300, seed=0)))
    output = str(tmp_path / "data")
    prepare(
        PrepareConfig(input=[str(text)], output=output, documents="line", vocab_size=150, workers=1)
    )
    return open_shards(tmp_path / "data", "train")


def test_counts_are_those_of_the_text_and_are_remembered(
    corpus: TokenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = Counter(
        token for d in range(corpus.num_documents) for token in corpus.document(d).tolist()
    )
    monkeypatch.setattr("bertsmith.data.shards.COUNT_CHUNK_TOKENS", 97)
    counted = corpus_frequencies(corpus).counts_V
    assert dict(by_hand) == {i: n for i, n in enumerate(counted.tolist()) if n}
    monkeypatch.setattr(TokenCorpus, "type_counts", lambda corpus: pytest.fail("counted again"))
    assert np.array_equal(corpus_frequencies(corpus).counts_V, counted)


@pytest.mark.parametrize("damage", ["{", "[]", "null", "other"])
def test_a_note_that_is_not_of_this_text_is_made_anew(corpus: TokenCorpus, damage: str) -> None:
    counted = corpus_frequencies(corpus).counts_V
    note = corpus.folder / frequency.COUNTS_FILE
    content = note.read_text()
    wrong = counted.tolist()
    wrong[9] += 1
    other = json.dumps({"fingerprint": corpus.fingerprint, "counts": wrong})
    note.write_text(other if damage == "other" else damage)
    assert np.array_equal(corpus_frequencies(corpus).counts_V, counted)
    assert note.read_text() == content
