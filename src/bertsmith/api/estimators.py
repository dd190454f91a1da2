"""Models of texts with `fit` and `predict`, to scikit-learn's contract and without importing it.

`fit` is `bertsmith finetune` and `predict` is `bertsmith predict`: the same recipes, so the same
numbers. A constructor only stores its parameters; what `fit` finds ends in an underscore.

Shape legend: N texts, C labels.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from bertsmith.api.config_of import with_options
from bertsmith.api.estimator import Estimator
from bertsmith.api.inputs import Given, read_given
from bertsmith.api.targets import indicators, label_lists, names_of
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import label_name
from bertsmith.errors import UserError
from bertsmith.recipes.classifier import Classifier, open_classifier
from bertsmith.recipes.config import Device, FinetuneConfig
from bertsmith.recipes.texts.predict import answers_of
from bertsmith.tasks.config import TaskName
from bertsmith.tasks.kind import Answer
from bertsmith.train.config import Precision


class TextEstimator(Estimator[Classifier]):
    """What the three kinds share: parameters, training, storage."""

    _task: ClassVar[TaskName]

    def __init__(
        self,
        model: str,
        *,
        output: str | None = None,
        epochs: float = 3.0,
        learning_rate: float = 1e-4,
        layer_decay: float | None = None,
        examples_per_step: int = 32,
        max_sequence_tokens: int | None = None,
        holdout_share: float = 0.1,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        options: Mapping[str, Any] | None = None,
        precision: Precision = "auto",
        device: Device = "auto",
        seed: int = 0,
        overwrite: bool = False,
        verbose: bool = False,
    ) -> None:
        """Store the parameters; nothing is checked or loaded before `fit`.

        Args:
            model: Checkpoint folder or a hub name, as `bertsmith finetune --model` takes it.
            output: Run folder to keep; None: a temporary one, which goes with the object.
            epochs: Passes over the texts.
            learning_rate: Peak of the rate, of the top layer where `layer_decay` is given.
            layer_decay: Factor of the rate from each layer to the one below it.
            examples_per_step: Examples behind one optimizer step.
            max_sequence_tokens: Longest text in tokens; None: the model's limit.
            holdout_share: Share of the texts that the best weights are picked by, where `fit` is
                given no `eval_set`.
            text_column: Of a table; None: found by name.
            pair_column: Of a table of pairs.
            label_column: Of a table.
            options: Any other option of `bertsmith finetune` by its key: `{"lora.rank": 8}`.
            precision: Of training and prediction.
            device: Where both run.
            seed: Everything random follows from it.
            overwrite: Whether a run in `output` may be replaced.
            verbose: Whether training says on standard error what the command would say.
        """
        self.model = model
        self.output = output
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.layer_decay = layer_decay
        self.examples_per_step = examples_per_step
        self.max_sequence_tokens = max_sequence_tokens
        self.holdout_share = holdout_share
        self.text_column = text_column
        self.pair_column = pair_column
        self.label_column = label_column
        self.options = options
        self.precision = precision
        self.device = device
        self.seed = seed
        self.overwrite = overwrite
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, *, eval_set: Any = None) -> Self:
        """Fine-tune on texts and their labels.

        Args:
            X: Texts, pairs of texts as tuples, or a table with text columns: pandas, polars, Arrow.
            y: Labels; None: the table's label column.
            eval_set: A table, or (texts, labels), to pick the best weights by; None: a part of X
                is held out.

        Raises:
            UserError: A parameter, the model or a row cannot be used.
            KeyboardInterrupt: A signal stopped the training.
        """
        given = self._targets(read_given(X, y, table=self._table(), is_labelled=True))
        judged = None if eval_set is None else self._judged(eval_set, given)
        self._fit_rows(
            given.rows(),
            None if judged is None else judged.rows(),
            lambda train, dev, run: self._config(given, train, dev, run),
        )
        return self

    def _table(self) -> TableConfig:
        return TableConfig(
            text_column=self.text_column,
            pair_column=self.pair_column,
            label_column=self.label_column,
        )

    def _config(self, given: Given, train: Path, dev: Path | None, run: Path) -> FinetuneConfig:
        """The config of the run."""
        columns = given.columns
        try:
            config = FinetuneConfig(
                model=self.model,
                data=str(train),
                output=str(run),
                eval=None if dev is None else str(dev),
                task=self._task,
                epochs=self.epochs,
                examples_per_step=self.examples_per_step,
                max_sequence_tokens=self.max_sequence_tokens,
                holdout_share=self.holdout_share,
                table=TableConfig(
                    text_column=columns.text,
                    pair_column=columns.pair,
                    label_column=columns.label,
                ),
                precision=self.precision,
                device=self.device,
                seed=self.seed,
                overwrite=self.overwrite,
            )
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        rates = {
            "optim.learning_rate": self.learning_rate,
            "optim.layer_decay": self.layer_decay,
        }
        return with_options(config, rates | dict(self.options or {}))

    def _judged(self, eval_set: Any, given: Given) -> Given:
        texts, labels = eval_set if isinstance(eval_set, tuple) else (eval_set, None)
        found = read_given(
            texts,
            labels,
            table=self._table(),
            is_labelled=True,
            is_pair=given.pairs is not None,
            usual=given.columns,
        )
        # The run looks for the training table's columns.
        renamed = Given(
            columns=given.columns, texts=found.texts, pairs=found.pairs, labels=found.labels
        )
        return self._written(renamed)

    def _targets(self, given: Given) -> Given:
        """Note what the labels are, and make them what a table takes."""
        raise NotImplementedError

    def _written(self, given: Given) -> Given:
        """Labels as a table takes them."""
        raise NotImplementedError

    def _open(self) -> Classifier:
        """The classifier of the fitted model's folder."""
        return open_classifier(
            self.model_folder_,
            max_sequence_tokens=None,
            precision=self.precision,
            device=self.device,
        )

    def _check_kind(self, opened: Classifier) -> None:
        """Refuse a model of another task."""
        if opened.kind.name != self._task:
            raise UserError(
                f"{self.model_folder_}: is a model of {opened.kind.name}, not {self._task}"
            )

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
        """What scikit-learn asks an object about itself; called by nobody else."""
        from sklearn.utils import (  # noqa: PLC0415
            ClassifierTags,
            InputTags,
            RegressorTags,
            Tags,
            TargetTags,
        )

        is_regressor = self._task == "regression"
        many = self._task == "multilabel"
        return Tags(
            estimator_type="regressor" if is_regressor else "classifier",
            target_tags=TargetTags(required=False, multi_output=many, single_output=not many),
            classifier_tags=None if is_regressor else ClassifierTags(multi_label=many),
            regressor_tags=RegressorTags() if is_regressor else None,
            input_tags=InputTags(two_d_array=False, string=True),
        )


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

    def _note_model(self, opened: Classifier) -> None:
        self._names = {name: name for name in opened.labels}
        self.classes_ = np.array(sorted(opened.labels))

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

    def _note_model(self, opened: Classifier) -> None:
        self._is_array = False
        self._names = {name: name for name in opened.labels}
        self.classes_ = np.array(sorted(opened.labels))

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
