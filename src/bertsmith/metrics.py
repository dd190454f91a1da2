"""How good a classifier is, counted over a whole table and never averaged over batches.

Everything but the loss follows from the confusion matrix, so that is all that is kept while
predictions come in: memory does not grow with the table.

Shape legend: N sequences, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HIGHER_IS_BETTER = {
    "accuracy": True,
    "macro_f1": True,
    "weighted_f1": True,
    "matthews_correlation": True,
    "loss": False,
}
"""The metrics that a run can be judged by."""


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """How well one label is recognised."""

    label: str

    precision: float
    """Share of the predictions of this label that are right; 0 if there are none."""

    recall: float
    """Share of this label's examples that are found; 0 if there are none."""

    f1: float
    """Harmonic mean of the two; 0 if both are."""

    support: int
    """Examples with this label."""


@dataclass(frozen=True, kw_only=True)
class ClassificationMetrics:
    """Scores over a whole table."""

    num_examples: int

    accuracy: float
    """Share of examples whose label is predicted."""

    macro_f1: float
    """Mean F1 of the labels that occur in the table or among the predictions."""

    weighted_f1: float
    """Mean F1 of the labels, weighted by their examples."""

    matthews_correlation: float
    """Matthews correlation for any number of classes (Gorodkin 2004), in [-1, 1]; 0 if either
    the labels or the predictions are all the same."""

    loss: float
    """Mean log-loss, in nats an example."""

    labels: tuple[LabelScore, ...]
    """Each label of the model, in its order."""

    confusion: tuple[tuple[int, ...], ...]
    """Examples by true label (row) and predicted label (column), in the order of `labels`."""

    def by_name(self) -> dict[str, float]:
        """The overall scores by their names, as they stand in summary.json."""
        return {name: float(getattr(self, name)) for name in HIGHER_IS_BETTER}


class ClassificationTally:
    """Counts predictions batch by batch; what is counted does not depend on the batches."""

    def __init__(self, num_labels: int) -> None:
        """Start at zero."""
        self._confusion_CC = torch.zeros(num_labels, num_labels, dtype=torch.int64)
        self._nats = 0.0

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        """Count one batch of scores and its true class ids.

        Raises:
            FloatingPointError: A score is not finite: the model is broken, and its predictions
                would be counted as if they meant something.
        """
        logits_NC, labels_N = logits_NC.detach().float().cpu(), labels_N.cpu()
        if not bool(torch.isfinite(logits_NC).all()):
            raise FloatingPointError("the model gives scores that are not finite (NaN or infinity)")
        num_labels = len(self._confusion_CC)
        cells_N = labels_N * num_labels + logits_NC.argmax(1)
        self._confusion_CC += torch.bincount(cells_N, minlength=num_labels**2).view(
            num_labels, num_labels
        )
        nats_N = nn.functional.cross_entropy(logits_NC.double(), labels_N, reduction="none")
        self._nats += float(nats_N.sum())

    def metrics(self, names: Sequence[str]) -> ClassificationMetrics:
        """Scores of all that was counted, for labels of these names.

        Source:
            The definitions of scikit-learn's metrics, against which the tests check them.
        """
        confusion_CC = self._confusion_CC
        total = int(confusion_CC.sum())
        assert total > 0, "metrics of no example"
        true_C, predicted_C = confusion_CC.sum(1), confusion_CC.sum(0)
        right_C = confusion_CC.diagonal().double()
        precision_C = right_C / predicted_C.clamp(min=1)
        recall_C = right_C / true_C.clamp(min=1)
        f1_C = 2 * right_C / (true_C + predicted_C).clamp(min=1)
        occurs_C = (true_C + predicted_C) > 0
        return ClassificationMetrics(
            num_examples=total,
            accuracy=float(right_C.sum()) / total,
            macro_f1=float(f1_C[occurs_C].mean()),
            weighted_f1=float((f1_C * true_C).sum()) / total,
            matthews_correlation=_matthews_correlation(confusion_CC),
            loss=self._nats / total,
            labels=tuple(
                LabelScore(
                    label=name,
                    precision=float(precision_C[i]),
                    recall=float(recall_C[i]),
                    f1=float(f1_C[i]),
                    support=int(true_C[i]),
                )
                for i, name in enumerate(names)
            ),
            confusion=tuple(tuple(row) for row in confusion_CC.tolist()),
        )


def _matthews_correlation(confusion_CC: Tensor) -> float:
    """In whole numbers up to the root, so that big tables lose nothing."""
    rows = confusion_CC.tolist()
    true = [sum(row) for row in rows]
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    total, right = sum(true), sum(rows[i][i] for i in range(len(rows)))
    covariance = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
    spread = (total**2 - sum(t * t for t in true)) * (total**2 - sum(p * p for p in predicted))
    return float(covariance / spread**0.5) if spread else 0.0
