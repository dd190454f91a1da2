"""Coverage counts what training predicts, position by position."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.coverage import Coverage, CoverageCounter
from bertsmith.data.frequency import frequencies
from bertsmith.data.stream import PretrainStream
from small_corpus import ListCorpus, skewed_lengths

PACKING = PackingConfig(tokens_per_pack=256, max_sequence_tokens=64)


class NumberedCorpus(ListCorpus):
    """Every token has an id of its own: where it stands in the text."""

    def document(self, index: int, /) -> NDArray[np.int64]:
        first = 5 + int(self._lengths_D[:index].sum())
        return first + np.arange(self._lengths_D[index])


def counter_of(
    corpus: ListCorpus, masking: MaskingConfig, *, vocab_size: int = 1000, sample: int = 1 << 20
) -> tuple[PretrainStream, CoverageCounter]:
    counts_V = np.zeros(vocab_size, np.int64)
    for document in range(corpus.num_documents):
        counts_V += np.bincount(corpus.document(document), minlength=vocab_size)
    stream = PretrainStream(
        corpus,
        packing=PACKING,
        masking=masking,
        tokens_per_step=512,
        seed=3,
        type_counts_V=counts_V,
    )
    known = frequencies(counts_V, corpus.vocab)
    counter = CoverageCounter(
        stream,
        corpus,
        known,
        packing=PACKING,
        is_estimate=masking.is_classic,
        sample_tokens=sample,
    )
    return stream, counter


@pytest.mark.parametrize("schedule", ["covering", "independent"])
def test_counts_are_those_of_the_steps_that_were_trained(schedule: str) -> None:
    """Two epochs and a part of the third, against every target of every step."""
    corpus = ListCorpus(skewed_lengths(40))
    masking = MaskingConfig(
        share=0.3,
        schedule=schedule,  # type: ignore[arg-type]
        rare_boost=0.0 if schedule == "covering" else 0.5,  # or packs would draw
    )
    stream, counter = counter_of(corpus, masking)
    steps = 2 * stream.steps_in_epoch(0) + stream.steps_in_epoch(0) // 3
    assert stream.epoch_of(steps)[1] > 0
    by_hand = Counter(
        token
        for step in range(steps)
        for batch in stream.step(step)
        for token in batch.targets_M.tolist()
    )
    found = counter.after(steps)
    assert dict(by_hand) == {i: n for i, n in enumerate(found.predicted_V.tolist()) if n}
    assert sum(count * n for count, n in found.counts.items()) == sum(by_hand.values())
    assert found.sample_tokens == corpus.num_tokens == found.occurrences_V.sum()
    assert found.sample_share == 1.0
    assert not found.is_estimate


def test_every_position_is_told_apart() -> None:
    """With an id for each position, what types got is what positions got."""
    corpus = NumberedCorpus([min(n, 150) for n in skewed_lengths(30)])
    corpus.vocab = replace(corpus.vocab, size=corpus.num_tokens + 5)
    stream, counter = counter_of(corpus, MaskingConfig(share=0.2), vocab_size=corpus.num_tokens + 5)
    by_hand = Counter(
        token
        for step in range(stream.steps_in_epoch(0) * 3)
        for batch in stream.step(step)
        for token in batch.targets_M.tolist()
    )
    found = counter.after(stream.steps_in_epoch(0) * 3)
    assert {i: n for i, n in enumerate(found.predicted_V.tolist()) if n} == dict(by_hand)
    assert found.counts.get(0, 0) == corpus.num_tokens - len(by_hand) == found.never_V.sum()
    assert found.types_never_predicted == found.counts.get(0, 0)
    assert found.never_predicted_share == found.counts.get(0, 0) / corpus.num_tokens


def test_covering_leaves_nothing_after_enough_epochs_and_coin_flips_do() -> None:
    """Of independent epochs 0.85^7 = 0.32 of the positions are left (issue 6)."""
    corpus = ListCorpus(skewed_lengths(200))
    covering = _after_epochs(corpus, MaskingConfig(share=0.15), 7)
    independent = _after_epochs(corpus, MaskingConfig(share=0.15, schedule="independent"), 7)
    assert covering.never_predicted_share == 0.0
    assert covering.types_never_predicted == 0
    assert min(covering.counts) >= 1
    assert independent.never_predicted_share == pytest.approx(0.85**7, abs=0.02)
    assert independent.is_estimate
    assert not covering.is_estimate


def _after_epochs(corpus: ListCorpus, masking: MaskingConfig, epochs: int) -> Coverage:
    stream, counter = counter_of(corpus, masking)
    return counter.after(epochs * stream.steps_in_epoch(0))


def test_counting_on_is_counting_at_once() -> None:
    corpus = ListCorpus(skewed_lengths(60))
    stream, counter = counter_of(corpus, MaskingConfig())
    steps = stream.steps_in_epoch(0)
    assert counter.whole_epochs(steps - 1) is None
    first = counter.whole_epochs(steps)
    assert first is not None
    assert first.epochs == 1.0
    assert counter.whole_epochs(steps + 1) is first
    counter.after(steps + 1)
    whole = counter.after(3 * steps)
    _, other = counter_of(corpus, MaskingConfig())
    assert whole.as_json() == other.after(3 * steps).as_json()


def test_a_large_text_is_sampled_from_all_over_it() -> None:
    corpus = ListCorpus(skewed_lengths(3000))
    stream, counter = counter_of(corpus, MaskingConfig(), sample=20_000)
    found = counter.after(2 * stream.steps_in_epoch(0))
    assert found.sample_tokens == pytest.approx(20_000, rel=0.35)
    assert found.sample_share == pytest.approx(found.sample_tokens / corpus.num_tokens)
    assert found.never_predicted_share == pytest.approx(1 - 2 * 0.15, abs=0.01)


def test_least_trained_types_and_buckets_are_sorted_out() -> None:
    zeros = np.zeros(9, np.int64)
    occurrences_V, predicted_V, never_V = zeros.copy(), zeros.copy(), zeros.copy()
    occurrences_V[5:] = [100, 10, 3, 4]
    predicted_V[5:] = [200, 5, 0, 0]
    never_V[5:] = [0, 5, 3, 4]
    found = Coverage(
        epochs=1.0,
        sample_tokens=117,
        sample_share=1.0,
        is_estimate=False,
        counts={0: 12, 1: 5, 2: 100},
        occurrences_V=occurrences_V,
        predicted_V=predicted_V,
        never_V=never_V,
        bucket_V=np.array([-1] * 5 + [2, 1, 0, 0], np.int8),
    )
    assert found.least_trained(3) == [8, 7, 6]
    content = found.as_json()
    assert (content["min_count"], content["max_count"]) == (0, 2)
    assert content["types_never_predicted"] == 2
    assert content["never_predicted_share"] == 12 / 117
    assert content["by_frequency"]["rare"] == {
        "types": 2,
        "types_never_predicted": 2,
        "tokens": 7,
        "predictions": 0,
        "predictions_per_token": 0.0,
        "never_predicted_share": 1.0,
    }
    assert content["by_frequency"]["frequent"]["predictions_per_token"] == 2.0
