"""Scores of spans are seqeval's in its default mode, those of plain tags scikit-learn's."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score

from bertsmith.metrics.spans import Span, TagMetrics, count_sentence, spans_of, tag_metrics

seqeval = pytest.importorskip("seqeval.metrics")

TAGS = ["O", "B-A", "I-A", "B-B", "I-B", "B-x-y", "I-x-y"]
Sentences = list[list[tuple[str, str]]]


def sentences_of(tags: list[str]) -> st.SearchStrategy[Sentences]:
    pair = st.tuples(st.sampled_from(tags), st.sampled_from(tags))
    return st.lists(st.lists(pair, min_size=1, max_size=12), min_size=1, max_size=5)


def scored(sentences: Sentences, *, has_spans: bool) -> TagMetrics:
    return tag_metrics(
        [
            count_sentence([a for a, _ in one], [b for _, b in one], nats=1.0, has_spans=has_spans)
            for one in sentences
        ],
        has_spans=has_spans,
    )


@given(sentences_of(TAGS))
def test_spans_are_counted_as_seqeval_counts_them(sentences: Sentences) -> None:
    said = [[a for a, _ in one] for one in sentences]
    true = [[b for _, b in one] for one in sentences]
    ours = scored(sentences, has_spans=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = (
            seqeval.classification_report(true, said, output_dict=True)
            if (any(spans_of(tags) for tags in (*said, *true)))
            else {}
        )
        overall = (
            seqeval.precision_score(true, said),
            seqeval.recall_score(true, said),
            seqeval.f1_score(true, said),
        )
    assert ours.overall[:3] == pytest.approx(overall)
    for kind, one in ours.by_kind.items():
        report = theirs[kind]
        assert one[:3] == pytest.approx((report["precision"], report["recall"], report["f1-score"]))
        assert one.support == report["support"]
    if theirs:
        assert ours.macro_f1 == pytest.approx(theirs["macro avg"]["f1-score"])


@given(sentences_of(["NOUN", "VERB", "ADJ", "X"]))
def test_plain_tags_are_scored_as_scikit_learn_scores_them(sentences: Sentences) -> None:
    said = [a for one in sentences for a, _ in one]
    true = [b for one in sentences for _, b in one]
    ours = scored(sentences, has_spans=False)
    assert ours.accuracy == pytest.approx(accuracy_score(true, said))
    assert ours.macro_f1 == pytest.approx(f1_score(true, said, average="macro", zero_division=0))


def test_a_tag_that_goes_on_with_nothing_begins_a_span() -> None:
    assert spans_of(["I-A", "I-A", "I-B", "O", "B-B", "B-B"]) == [
        Span(0, 2, "A"),
        Span(2, 3, "B"),
        Span(4, 5, "B"),
        Span(5, 6, "B"),
    ]
