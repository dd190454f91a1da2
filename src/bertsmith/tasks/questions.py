"""Answers that stand in a text: extractive question answering.

It is no `TaskKind`: those score a table's rows, and here a score is of a token of a window.

Shape legend: R windows, Q questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bertsmith.data.questions.question import Question
from bertsmith.data.questions.windows import QuestionWindows
from bertsmith.metrics.answers import (
    AnswerScore,
    JudgedQuestion,
    best_null_threshold,
    score_answer,
)
from bertsmith.tasks.answer_scan import Found
from bertsmith.tasks.config import MONITORS, TaskName

OF_IMPOSSIBLE = ("has_answer_f1", "has_answer_exact_match", "no_answer_accuracy")
"""Metrics that need questions without an answer."""


@dataclass(frozen=True, kw_only=True)
class Answering:
    """The kind, and whether a question may have no answer (SQuAD 2.0)."""

    name: ClassVar[TaskName] = "questions"
    holdout_said: ClassVar[str] = "by a hash of each context"
    headline: ClassVar[tuple[str, ...]] = ("f1", "exact_match", "loss")

    has_impossible: bool

    @property
    def monitors(self) -> tuple[str, ...]:
        """Metrics that can pick the best weights."""
        left_out = () if self.has_impossible else OF_IMPOSSIBLE
        return tuple(name for name in MONITORS[self.name] if name not in left_out)

    @property
    def monitor(self) -> str:
        """The metric that picks the best weights if nothing is said."""
        return self.monitors[0]

    def describe(self, names: Sequence[str], /) -> str:
        """What a model of this kind is, in a few words for its card."""
        more = ", or says that there is none" if self.has_impossible else ""
        return f"model that finds the answer to a question in a text{more}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundAnswer:
    """What a model says to one question."""

    text: str
    """A piece of the context as it stands there; empty for no answer."""

    start: int | None
    """Its first character's place in the context; None for no answer."""

    end: int | None
    score: float
    """Probability of what is said, among all spans of all windows (and no answer)."""

    no_answer: float | None
    """Probability of no answer; None from a model that never says so."""


def answers_of(
    found: Found,
    windows: QuestionWindows,
    questions: Sequence[Question],
    *,
    null_threshold: float | None,
) -> list[FoundAnswer]:
    """What is said to each question.

    Args:
        found: What the windows say together.
        windows: Of the questions.
        questions: In their order.
        null_threshold: No answer is said if it scores more than the best span by more than this;
            None: never.
    """
    total_Q = found.total_Q
    if null_threshold is not None:
        total_Q = torch.logaddexp(total_Q, found.null_Q)
    chances = (found.best_Q - total_Q).exp().nan_to_num().tolist()
    null_chances = (found.null_Q - total_Q).exp().tolist()
    nothing = says_nothing(found, null_threshold)
    said = []
    for i, span in enumerate(_spans(found, windows)):
        no_answer = None if null_threshold is None else null_chances[i]
        if nothing[i] or span is None:
            score = 0.0 if no_answer is None else no_answer
            said.append(
                FoundAnswer(text="", start=None, end=None, score=score, no_answer=no_answer)
            )
            continue
        start, end = span
        text = questions[i].context[start:end]
        said.append(
            FoundAnswer(text=text, start=start, end=end, score=chances[i], no_answer=no_answer)
        )
    return said


def says_nothing(found: Found, null_threshold: float | None) -> list[bool]:
    """Whether each question is said to have no answer."""
    if null_threshold is None:
        return [False] * len(found.best_Q)
    answers: list[bool] = (found.margin_Q > null_threshold).tolist()
    return answers


def score_spans(
    found: Found, windows: QuestionWindows, questions: Sequence[Question]
) -> list[AnswerScore]:
    """Of the best span of each question."""
    scores = []
    for one, span in zip(questions, _spans(found, windows), strict=True):
        text = "" if span is None else one.context[slice(*span)]
        scores.append(score_answer(text, one.golds))
    return scores


def tuned_threshold(
    found: Found, scores: Sequence[AnswerScore], questions: Sequence[Question]
) -> float:
    """As `best_null_threshold`."""
    margins: list[float] = found.margin_Q.tolist()
    return best_null_threshold(
        margins, [score.f1 for score in scores], [bool(one.answers) for one in questions]
    )


def judged(
    found: Found,
    windows: QuestionWindows,
    questions: Sequence[Question],
    scores: Sequence[AnswerScore],
    *,
    nats_Q: Sequence[float],
    null_threshold: float | None,
) -> list[JudgedQuestion]:
    """What each question adds to the metrics.

    Args:
        found: What the windows say together.
        windows: Of the questions.
        questions: In their order.
        scores: As `score_spans`.
        nats_Q: Loss of each question's windows, summed.
        null_threshold: As in `answers_of`.
    """
    nothing = says_nothing(found, null_threshold)
    counts = windows.examples.owners_N.bincount().tolist()
    return [
        JudgedQuestion(
            span=scores[i],
            says_nothing=nothing[i],
            has_answer=bool(one.answers),
            nats=nats_Q[i],
            num_windows=counts[i],
        )
        for i, one in enumerate(questions)
    ]


def _spans(found: Found, windows: QuestionWindows) -> list[tuple[int, int] | None]:
    """Where the best span of each question stands in its context; None in one without tokens."""
    is_there = found.best_Q.isfinite().tolist()
    ends = zip(found.first_Q.tolist(), found.last_Q.tolist(), strict=True)
    return [
        windows.bounds(i, first, last) if is_there[i] else None
        for i, (first, last) in enumerate(ends)
    ]
