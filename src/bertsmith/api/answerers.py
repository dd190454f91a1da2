"""Answers from texts with `fit` and `predict`: the Python side of `--task questions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.api.estimator import Estimator, Rows
from bertsmith.api.inputs import as_list, column_names, plain_tree
from bertsmith.data.config import TableConfig
from bertsmith.data.questions.files import KEYS, question_of
from bertsmith.data.questions.question import Question, QuestionFaultError
from bertsmith.errors import UserError
from bertsmith.metrics.answers import score_answer
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.questions.predict import QUESTIONS_AT_ONCE, as_row
from bertsmith.recipes.questions.task import Answerer, open_answerer
from bertsmith.tasks.questions import FoundAnswer


class QuestionAnswerer(Estimator[Answerer]):
    """The answer to a question as it stands in a text: `QuestionAnswerer(model).fit(rows)`.

    A row is a mapping with `question`, `context` and, to learn from, `answers` as in SQuAD; rows
    come as a list, or as a table with columns of these names.
    """

    _task = "questions"

    def _learned(self, X: Any, y: Any) -> Rows:
        self._refuse_columns()
        if y is not None:
            raise UserError("fit: answers stand in the rows of questions; give fit(rows)")
        return _with_answers(read_rows(X, has_answers=True))

    def _judged(self, X: Any, y: Any, *, learned: Rows) -> Rows:
        return self._learned(X, y)

    def _refuse_columns(self) -> None:
        for name in ("text_column", "pair_column", "label_column"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"{name}: questions have keys of their own, {', '.join(map(repr, KEYS))}; name "
                    "columns so"
                )

    def predict(self, X: Any) -> list[str]:
        """The answer to each question, a piece of its context; empty where there is none."""
        return [answer.text for _, answer in self._answers(X)]

    def answers(self, X: Any) -> list[dict[str, object]]:
        """What `bertsmith predict` writes of each question: answer, start, end, score."""
        return [as_row(question, answer) for question, answer in self._answers(X)]

    def score(self, X: Any, y: None = None) -> float:
        """F1 over all questions, from 0 to 1, as SQuAD counts it."""
        questions = read_rows(X, has_answers=True)
        said = self._said(questions)
        scores = [
            score_answer(answer.text, question.golds).f1
            for question, answer in zip(questions, said, strict=True)
        ]
        return sum(scores) / len(scores)

    def _answers(self, X: Any) -> list[tuple[Question, FoundAnswer]]:
        questions = read_rows(X, has_answers=False)
        return list(zip(questions, self._said(questions), strict=True))

    def _said(self, questions: list[Question]) -> list[FoundAnswer]:
        """What the model says, in chunks as those of the command."""
        answerer = self._fitted()
        said: list[FoundAnswer] = []
        for start in range(0, len(questions), QUESTIONS_AT_ONCE):
            some = questions[start : start + QUESTIONS_AT_ONCE]
            said += answerer.answer(some, tokens_per_pack=PredictConfig.tokens_per_pack)[0]
        return said

    def _open(self, folder: str) -> Answerer:
        return open_answerer(
            folder, max_sequence_tokens=None, precision=self.precision, device=self.device
        )


def read_rows(X: Any, *, has_answers: bool) -> list[Question]:
    """Questions as Python programs hold them, checked.

    Args:
        X: A list of mappings, or a table with named columns.
        has_answers: Whether they must have answers.

    Raises:
        UserError: X is neither, or a row cannot be used.
    """
    names = None if isinstance(X, list | tuple) else column_names(X)
    rows: list[Any]
    if names is None:
        rows = as_list(X, what="questions")
    else:
        columns = {name: as_list(X[name], what=name) for name in KEYS if name in names}
        if not columns:
            raise UserError("questions: the table has no column `question`; name its columns so")
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = []
    seen: set[str] = set()
    for i, row in enumerate(rows):
        try:
            if not isinstance(row, Mapping):
                raise QuestionFaultError(f"is a {type(row).__name__}, not a mapping of keys")
            wanted = KEYS if has_answers else ("id", "question", "context")
            content = {key: plain_tree(row.get(key)) for key in wanted}
            place = f"questions, row {i}"
            one = question_of(content, place, usual_id=str(i), has_answers=has_answers)
            if has_answers and one.id in seen:
                raise QuestionFaultError(f"the id {one.id!r} is that of an earlier row, too")
        except QuestionFaultError as fault:
            raise UserError(f"questions, row {i}: {fault}") from None
        seen.add(one.id)
        found.append(one)
    if has_answers and not found:
        raise UserError("there are no questions")
    return found


def _with_answers(questions: Sequence[Question]) -> Rows:
    """Rows of a file, as `bertsmith finetune` reads them."""
    rows = [
        {
            "id": one.id,
            "question": one.question,
            "context": one.context,
            "answers": [{"text": text, "answer_start": start} for text, start in one.answers],
            "is_impossible": not one.answers,
        }
        for one in questions
    ]
    return Rows(rows=rows, table=TableConfig())
