"""Exact match and F1 of answers, by hand from the official scripts' definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.metrics.answers import (
    AnswerScore,
    JudgedQuestion,
    answer_metrics,
    best_null_threshold,
    normalized,
    score_answer,
)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a.b.c.", "abc"),
        ("An apple a day", "apple day"),
        ("state-of-the-art", "stateoftheart"),
        ("theory of anathema", "theory of anathema"),
        ("the", ""),
        ("Zürich\n(the city)", "zürich city"),
        ("$5,000", "5000"),
        ("“quoted”", "“quoted”"),  # not ASCII, so it stays, as in the official script
    ],
)
def test_answers_are_compared_without_case_punctuation_and_articles(text: str, same: str) -> None:
    assert normalized(text) == same


@pytest.mark.parametrize(
    ("said", "golds", "exact", "f1"),
    [
        ("the Norman dynasty", ["Norman dynasty"], 1.0, 1.0),
        ("in Paris, France", ["Paris"], 0.0, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("Rome", ["Paris", "the city of Rome"], 0.0, 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ("to be or not to be", ["to be be"], 0.0, 2 * (3 / 6) * 1 / (3 / 6 + 1)),
        ("London", ["Paris"], 0.0, 0.0),
        ("", ["Paris"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("the", [], 1.0, 1.0),  # nothing is left of it
        ("Paris", ["the", "Paris"], 1.0, 1.0),
    ],
)
def test_the_best_of_the_given_answers_counts(
    said: str, golds: list[str], exact: float, f1: float
) -> None:
    assert score_answer(said, golds) == pytest.approx((exact, f1))


def one(*, f1: float, has_answer: bool, says_nothing: bool, nats: float = 1.0) -> JudgedQuestion:
    return JudgedQuestion(
        span=AnswerScore(float(f1 == 1.0), f1),
        says_nothing=says_nothing,
        has_answer=has_answer,
        nats=nats,
        num_windows=2,
    )


def test_questions_without_an_answer_are_counted_apart() -> None:
    found = answer_metrics(
        [
            one(f1=1.0, has_answer=True, says_nothing=False),
            one(f1=0.5, has_answer=True, says_nothing=False, nats=5.0),
            one(f1=1.0, has_answer=True, says_nothing=True),
            one(f1=0.0, has_answer=False, says_nothing=True),
            one(f1=0.0, has_answer=False, says_nothing=False),
        ],
        null_threshold=0.5,
    )
    assert found.by_name() == pytest.approx(
        {
            "f1": 2.5 / 5,
            "exact_match": 2 / 5,
            "has_answer_f1": 1.5 / 3,
            "has_answer_exact_match": 1 / 3,
            "no_answer_accuracy": 1 / 2,
            "loss": 9.0 / 10,
        }
    )
    assert found.details() == {"num_impossible": 2, "null_threshold": 0.5}
    without = answer_metrics(
        [one(f1=0.5, has_answer=True, says_nothing=False)], null_threshold=None
    )
    assert set(without.by_name()) == {"f1", "exact_match", "loss"}


def total_f1(
    threshold: float, margins: list[float], f1s: list[float], has_answer: list[bool]
) -> float:
    return sum(
        (0.0 if there else 1.0) if margin > threshold else (f1 if there else 0.0)
        for margin, f1, there in zip(margins, f1s, has_answer, strict=True)
    )


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, math.inf]),
            st.sampled_from([0.0, 0.4, 1.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_threshold_gives_a_better_f1_than_the_tuned_one(
    rows: list[tuple[float, float, bool]],
) -> None:
    margins, f1s, has_answer = (list(column) for column in zip(*rows, strict=True))
    tuned = best_null_threshold(margins, f1s, has_answer)
    assert math.isfinite(tuned)
    of_tuned = total_f1(tuned, margins, f1s, has_answer)
    for other in (-9.0, -2.0, -0.5, 0.2, 1.0, 9.0):
        assert of_tuned >= total_f1(other, margins, f1s, has_answer) - 1e-9


def test_the_threshold_lies_halfway_between_two_margins() -> None:
    # Up to -1 spans win 1 and 1; at 3 one would lose a question without an answer.
    assert best_null_threshold([-2.0, 3.0, -1.0], [1.0, 0.0, 1.0], [True, False, True]) == 1.0
