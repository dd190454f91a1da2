"""Models that say something of each text: `fit`, `predict`, `predict_proba`, `score`.

Shape legend: N texts, C labels.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.api.estimator import Estimator, Rows
from bertsmith.api.inputs import Given, read_given
from bertsmith.api.targets import indicators, label_lists, names_of
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import label_name
from bertsmith.errors import UserError
from bertsmith.recipes.texts.predict import answers_of
from bertsmith.recipes.texts.task import Classifier, open_classifier
from bertsmith.tasks.kind import Answer


class TextEstimator(Estimator[Classifier]):
    """What the kinds share that say something of each row of text."""

    def _learned(self, X: Any, y: Any) -> Rows:
        given = self._targets(read_given(X, y, table=self._table(), is_labelled=True))
        columns = given.columns
        table = TableConfig(
            text_column=columns.text, pair_column=columns.pair, label_column=columns.label
        )
        return Rows(rows=list(given.rows()), table=table, given=given)

    def _judged(self, X: Any, y: Any, *, learned: Rows) -> Rows:
        given = learned.given
        assert given is not None, "rows of text"
        found = read_given(
            X,
            y,
            table=self._table(),
            is_labelled=True,
            is_pair=given.pairs is not None,
            usual=given.columns,
        )
        # The run looks for the training table's columns.
        renamed = Given(
            columns=given.columns, texts=found.texts, pairs=found.pairs, labels=found.labels
        )
        return Rows(rows=list(self._written(renamed).rows()), table=learned.table)

    @abstractmethod
    def _targets(self, given: Given) -> Given:
        """Note what the labels are, and make them what a table takes."""

    @abstractmethod
    def _written(self, given: Given) -> Given:
        """Labels as a table takes them."""

    def _open(self, folder: str) -> Classifier:
        opened = open_classifier(
            folder, max_sequence_tokens=None, precision=self.precision, device=self.device
        )
        if opened.kind.name != self._task:
            raise UserError(f"{folder}: is a model of {opened.kind.name}, not {self._task}")
        return opened

    def _answers(self, X: Any) -> tuple[Classifier, list[Answer]]:
        """What the model says of each text."""
        classifier = self._fitted()
        given = read_given(
            X,
            table=TableConfig(text_column=self.text_column, pair_column=self.pair_column),
            is_labelled=False,
            is_pair=classifier.is_pair,
            usual=classifier.usual,
        )
        return classifier, answers_of(classifier, given.texts, given.pairs)

    def _score_rows(self, X: Any, y: Any) -> list[Any]:
        """Labels that go with X, as they were given."""
        usual = self._fitted().usual
        labels = read_given(X, y, table=self._table(), is_labelled=True, usual=usual).labels
        assert labels is not None, "they were asked for"
        return labels

    def __sklearn_tags__(self) -> Any:
        """As `Estimator`, with the kind of answers."""
        from sklearn.utils import ClassifierTags, RegressorTags, TargetTags  # noqa: PLC0415

        is_regressor = self._task == "regression"
        many = self._task == "multilabel"
        tags = super().__sklearn_tags__()
        tags.estimator_type = "regressor" if is_regressor else "classifier"
        tags.target_tags = TargetTags(required=False, multi_output=many, single_output=not many)
        if is_regressor:
            tags.regressor_tags = RegressorTags()
        else:
            tags.classifier_tags = ClassifierTags(multi_label=many)
        return tags


class TextClassifier(TextEstimator):
    """One class a text, or a pair of texts: `TextClassifier(model).fit(texts, labels)`."""

    _task = "classification"

    classes_: np.ndarray[Any, np.dtype[Any]]
    """Labels as they were given, sorted; the columns of `predict_proba`."""

    def _targets(self, given: Given) -> Given:
        assert given.labels is not None, "they were asked for"
        self._names = names_of(given.labels)
        values = list(self._names.values())
        try:
            values.sort()
        except TypeError as error:
            raise UserError("labels: words and numbers are mixed; make them one kind") from error
        self.classes_ = np.array(values)
        return self._written(given)

    def _written(self, given: Given) -> Given:
        return given

    def _note_model(self, classifier: Classifier) -> None:
        self._names = {name: name for name in classifier.labels}
        self.classes_ = np.array(sorted(classifier.labels))

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"classes": self.classes_.tolist()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._names = names_of(state["classes"])
        self.classes_ = np.array(state["classes"])

    def predict(self, X: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """The class of each text, shape N, in the form that labels had."""
        _, answers = self._answers(X)
        said = [self._names[str(answer.said)] for answer in answers]
        return np.array(said, dtype=self.classes_.dtype)

    def predict_proba(self, X: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Probability of each class, shape (N, C), in the order of `classes_`."""
        classifier, answers = self._answers(X)
        column = {value: i for i, value in enumerate(self.classes_.tolist())}
        order = [column[self._names[name]] for name in classifier.labels]
        chances_NC = np.zeros((len(answers), len(order)))
        for row, answer in enumerate(answers):
            chances_NC[row, order] = list(answer.chances)
        return chances_NC

    def score(self, X: Any, y: Any = None) -> float:
        """Share of texts whose class is right."""
        truths = self._score_rows(X, y)
        names_of(truths)  # says where one is missing
        _, answers = self._answers(X)
        right = [
            answer.said == label_name(truth) for answer, truth in zip(answers, truths, strict=True)
        ]
        return float(np.mean(right))


class MultilabelClassifier(TextEstimator):
    """Any number of labels a text: lists of labels, or an array of 0 and 1 with a column a label.

    `predict` answers in the form that `fit` was given.
    """

    _task = "multilabel"

    classes_: np.ndarray[Any, np.dtype[Any]]
    """Labels in order; of an array of 0 and 1 the numbers of its columns."""

    def _targets(self, given: Given) -> Given:
        assert given.labels is not None, "they were asked for"
        self._is_array = indicators(given.labels)
        lists = label_lists(given.labels, is_array=self._is_array)
        if self._is_array:
            self._names = names_of(range(len(given.labels[0])))
        else:
            self._names = names_of([label for labels in lists for label in labels])
        self.classes_ = np.array(sorted(self._names.values(), key=_sort_key))
        return self._written(given)

    def _written(self, given: Given) -> Given:
        assert given.labels is not None, "they were asked for"
        lists = label_lists(given.labels, is_array=self._is_array)
        return Given(
            columns=given.columns, texts=given.texts, pairs=given.pairs, labels=list(lists)
        )

    def _note_model(self, classifier: Classifier) -> None:
        self._is_array = False
        self._names = {name: name for name in classifier.labels}
        self.classes_ = np.array(sorted(classifier.labels))

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"classes": self.classes_.tolist(), "is_array": self._is_array}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._names = names_of(state["classes"])
        self.classes_ = np.array(state["classes"])
        self._is_array = bool(state["is_array"])

    def predict(self, X: Any) -> Any:
        """Labels of each text: a list of lists, or 0 and 1 of shape (N, C), as `fit` was given."""
        _, answers = self._answers(X)
        found = [[self._names[name] for name in _labels(answer)] for answer in answers]
        return self._as_array(found) if self._is_array else found

    def predict_proba(self, X: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Probability of each label, shape (N, C), in the order of `classes_`.

        A column that was 0 throughout in training has the probability 0.
        """
        classifier, answers = self._answers(X)
        column = {value: i for i, value in enumerate(self.classes_.tolist())}
        order = [column[self._names[name]] for name in classifier.labels]
        chances_NC = np.zeros((len(answers), len(column)))
        for row, answer in enumerate(answers):
            chances_NC[row, order] = list(answer.chances)
        return chances_NC

    def score(self, X: Any, y: Any = None) -> float:
        """Share of texts whose labels are all right."""
        truths = label_lists(self._score_rows(X, y), is_array=self._is_array)
        _, answers = self._answers(X)
        return float(
            np.mean(
                [
                    set(_labels(answer)) == set(names_of(truth))
                    for answer, truth in zip(answers, truths, strict=True)
                ]
            )
        )

    def _as_array(self, found: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        column = {value: i for i, value in enumerate(self.classes_.tolist())}
        has_NC = np.zeros((len(found), len(column)), dtype=np.int64)
        for row, labels in enumerate(found):
            has_NC[row, [column[label] for label in labels]] = 1
        return has_NC


class TextRegressor(TextEstimator):
    """A number a text, or a pair of texts."""

    _task = "regression"

    def _targets(self, given: Given) -> Given:
        return self._written(given)

    def _written(self, given: Given) -> Given:
        assert given.labels is not None, "they were asked for"
        for row, label in enumerate(given.labels):
            is_number = isinstance(label, int | float) and not isinstance(label, bool)
            if not is_number or not math.isfinite(label):
                raise UserError(f"labels, row {row}: is {label!r:.40}, not a finite number")
        return given

    def predict(self, X: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The number of each text, shape N."""
        _, answers = self._answers(X)
        return np.array([answer.said for answer in answers], dtype=np.float64)

    def score(self, X: Any, y: Any = None) -> float:
        """The coefficient of determination: 1 is perfect, 0 no better than the mean."""
        truth_N = np.array(self._score_rows(X, y), dtype=np.float64)
        missed = float(((truth_N - self.predict(X)) ** 2).sum())
        spread = float(((truth_N - truth_N.mean()) ** 2).sum())
        return 1.0 - missed / spread if spread else float(missed == 0.0)


def _labels(answer: Answer) -> list[str]:
    assert isinstance(answer.said, list), "a text has a list of labels"
    return answer.said


def _sort_key(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value
