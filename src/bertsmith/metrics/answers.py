"""How well answers are found in texts: exact match and F1, as SQuAD's official scripts count.

Both compare words after normalisation: lower case, no ASCII punctuation, no articles, single
spaces. The best of several given answers counts. Of a question without an answer, saying nothing is
right and anything else wrong.

Shape legend: Q questions.

Source:
    Rajpurkar et al. 2016, section 6.1, and 2018, with their evaluation scripts' rules.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bertsmith.metrics.score_table import ScoreTable

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScore(NamedTuple):
    """Of one answer."""

    exact_match: float
    f1: float


def normalized(text: str) -> str:
    """An answer as it is compared."""
    words = _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
    return " ".join(words)


def score_answer(said: str, golds: Sequence[str]) -> AnswerScore:
    """Compare an answer with those that were given, and take the best of each score.

    Args:
        said: The answer; empty for none.
        golds: What was given; none if the question has no answer.
    """
    wanted = [words for gold in golds if (words := normalized(gold))] or [""]
    found = normalized(said)
    scores = [_compared(found, gold) for gold in wanted]
    return AnswerScore(
        max(score.exact_match for score in scores), max(score.f1 for score in scores)
    )


def _compared(found: str, gold: str) -> AnswerScore:
    is_exact = float(found == gold)
    found_words, gold_words = found.split(), gold.split()
    if not found_words or not gold_words:
        return AnswerScore(is_exact, is_exact)
    shared = (Counter(found_words) & Counter(gold_words)).total()
    return AnswerScore(is_exact, 2 * shared / (len(found_words) + len(gold_words)))


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedQuestion:
    """What one question adds to the scores."""

    span: AnswerScore
    """Of the best span, whatever is said in the end."""

    says_nothing: bool
    """Whether no answer is given in the end."""

    has_answer: bool
    nats: float
    """Loss of its windows, summed."""

    num_windows: int

    @property
    def score(self) -> AnswerScore:
        """Of what is said."""
        if not self.says_nothing:
            return self.span
        right = 0.0 if self.has_answer else 1.0
        return AnswerScore(right, right)


@dataclass(frozen=True, kw_only=True)
class AnswerMetrics:
    """Scores over a whole set, as shares of one."""

    num_examples: int
    """Questions."""

    num_impossible: int
    """Of these, the ones without an answer."""

    f1: float
    exact_match: float
    has_answer: AnswerScore | None
    """Over questions with an answer; None without any."""

    no_answer: float | None
    """Share of right ones among questions without an answer, where exact match and F1 are the same;
    None without any."""

    loss: float
    """Nats a window, mean of both ends."""

    null_threshold: float | None
    """By how much no answer had to score more than the best span to be said; None: it is never
    said."""

    def by_name(self) -> dict[str, float]:
        """The scores by their names."""
        found = {"f1": self.f1, "exact_match": self.exact_match}
        if self.num_impossible:
            if self.has_answer is not None:
                found["has_answer_f1"] = self.has_answer.f1
                found["has_answer_exact_match"] = self.has_answer.exact_match
            assert self.no_answer is not None, "there are such questions"
            found["no_answer_accuracy"] = self.no_answer
        return found | {"loss": self.loss}

    def details(self) -> Mapping[str, object]:
        """How many questions have no answer, and when none is said."""
        return {"num_impossible": self.num_impossible, "null_threshold": self.null_threshold}

    def tables(self) -> Sequence[ScoreTable]:
        """Nothing more."""
        return []


def answer_metrics(
    questions: Sequence[JudgedQuestion], *, null_threshold: float | None
) -> AnswerMetrics:
    """Scores of some questions, at least one.

    Args:
        questions: They.
        null_threshold: By which it was decided that nothing is said.
    """
    num = len(questions)
    assert num, "metrics of no question"
    scores = [one.score for one in questions]
    with_answer = [score for score, one in zip(scores, questions, strict=True) if one.has_answer]
    without = [score for score, one in zip(scores, questions, strict=True) if not one.has_answer]
    return AnswerMetrics(
        num_examples=num,
        num_impossible=len(without),
        f1=_mean([score.f1 for score in scores]),
        exact_match=_mean([score.exact_match for score in scores]),
        has_answer=AnswerScore(
            _mean([score.exact_match for score in with_answer]),
            _mean([score.f1 for score in with_answer]),
        )
        if with_answer
        else None,
        no_answer=_mean([score.f1 for score in without]) if without else None,
        loss=sum(one.nats for one in questions) / sum(one.num_windows for one in questions),
        null_threshold=null_threshold,
    )


def best_null_threshold(
    margins_Q: Sequence[float], span_f1s_Q: Sequence[float], has_answer_Q: Sequence[bool]
) -> float:
    """The threshold over which no answer is said, for the best F1 over all questions.

    The F1 is that of the official script's `best_f1_thresh`: at first all questions are said to
    have no answer; then, by rising margin, one after the other gets its span. Of equal F1s the
    lowest threshold. It lies halfway to the next margin, so that rounding decides nothing.

    Args:
        margins_Q: By how much no answer scores more than the best span; infinite without a span.
        span_f1s_Q: F1 of the best span, which is 0 where there is no answer.
        has_answer_Q: Whether there is one.
    """
    gains: dict[float, float] = {}
    for margin, f1, has_answer in zip(margins_Q, span_f1s_Q, has_answer_Q, strict=True):
        if math.isfinite(margin):
            gains[margin] = gains.get(margin, 0.0) + (f1 if has_answer else -1.0)
    steps = sorted(gains)
    if not steps:
        return 0.0
    threshold, right, best = steps[0] - 1.0, 0.0, 0.0
    for margin, after in zip(steps, [*steps[1:], steps[-1] + 2.0], strict=True):
        right += gains[margin]
        if right > best:
            threshold, best = (margin + after) / 2, right
    return threshold


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
