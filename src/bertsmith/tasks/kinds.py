"""The kinds of task that can be fine-tuned, by what a saved model says of itself."""

from typing import Any

from bertsmith.model.objectives import ProblemType
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.kind import TaskKind
from bertsmith.tasks.multilabel import Multilabel
from bertsmith.tasks.regression import Regression


def kind_of(problem_type: ProblemType, *, label_separator: str | None = None) -> TaskKind[Any]:
    """The kind of a saved model.

    Args:
        problem_type: As its config says.
        label_separator: What stood between labels in its training table.
    """
    match problem_type:
        case "multi_label_classification":
            return Multilabel(label_separator)
        case "regression":
            return Regression()
        case "sentence_embedding":
            raise AssertionError("what an embedder is scored by follows from the table")
        case "single_label_classification":
            return Classification()
