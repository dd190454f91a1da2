"""How good a classifier is, counted over a whole table and never averaged over batches.

Everything but the loss follows from the confusion matrix, so that is all that `ClassificationTally`
keeps while predictions come in. What orders or weighs probabilities (ROC-AUC, average precision,
calibration) needs all scores at once: `classification_metrics` takes them.

Shape legend: N sequences, C classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bertsmith.metrics.calibration import calibration_error
from bertsmith.metrics.ranking import average_precision, mean_of_defined, roc_auc
from bertsmith.metrics.score_table import ScoreTable

LABELS_IN_GRID = 12
"""A confusion matrix of more labels is wider than a terminal: the worst confusions are listed."""

OF_SCORES = ("roc_auc", "average_precision", "calibration_error")
"""What needs all scores at once."""

HIGHER_IS_BETTER = {
    "accuracy": True,
    "macro_f1": True,
    "weighted_f1": True,
    "matthews_correlation": True,
    "loss": False,
}
"""What follows from the confusion matrix and the loss."""


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

    roc_auc: float | None = None
    """Area under the ROC curve: of two classes that of the last one, of more the mean of each
    against the rest; None if not asked for, or if no class has examples both in it and out."""

    average_precision: float | None = None
    """Of the same, the mean precision by recall."""

    calibration_error: float | None = None
    """Expected calibration error of the predicted class's probability (Guo et al. 2017)."""

    def by_name(self) -> dict[str, float]:
        """The overall scores by their names, as they stand in summary.json."""
        values = {name: getattr(self, name) for name in (*HIGHER_IS_BETTER, *OF_SCORES)}
        return {name: float(value) for name, value in values.items() if value is not None}

    def details(self) -> Mapping[str, object]:
        """Each label, and what was taken for what."""
        return {"labels": [asdict(score) for score in self.labels], "confusion": self.confusion}

    def tables(self) -> Sequence[ScoreTable]:
        """Each label, and what was taken for what."""
        by_label = ScoreTable(
            title="each label",
            headings=("label", "precision", "recall", "f1", "support"),
            rows=[
                (s.label, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", f"{s.support:,}")
                for s in self.labels
            ],
        )
        return by_label, self._confusions()

    def _confusions(self) -> ScoreTable:
        names = [score.label for score in self.labels]
        if len(names) <= LABELS_IN_GRID:
            return ScoreTable(
                title="confusion matrix",
                headings=("true \\ predicted", *names),
                rows=[
                    (name, *(f"{count:,}" for count in row))
                    for name, row in zip(names, self.confusion, strict=True)
                ],
            )
        wrong = [
            (count, names[i], names[j])
            for i, row in enumerate(self.confusion)
            for j, count in enumerate(row)
            if i != j and count
        ]
        worst = sorted(wrong, key=lambda w: (-w[0], w[1:]))[:LABELS_IN_GRID]
        return ScoreTable(
            title="most frequent confusions (all with --json)",
            headings=("true", "predicted", "examples"),
            rows=[(true, predicted, f"{count:,}") for count, true, predicted in worst],
        )


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


def classification_metrics(
    logits_NC: Tensor, labels_N: Tensor, names: Sequence[str]
) -> ClassificationMetrics:
    """All scores of a whole table at once.

    Raises:
        FloatingPointError: As `ClassificationTally.add`.
    """
    tally = ClassificationTally(len(names))
    tally.add(logits_NC, labels_N)
    chances_NC = logits_NC.double().softmax(1)
    judged = range(len(names)) if len(names) > 2 else range(len(names) - 1, len(names))
    best_N = chances_NC.max(1)
    return dataclasses.replace(
        tally.metrics(names),
        roc_auc=mean_of_defined([roc_auc(chances_NC[:, c], labels_N == c) for c in judged]),
        average_precision=mean_of_defined(
            [average_precision(chances_NC[:, c], labels_N == c) for c in judged]
        ),
        calibration_error=calibration_error(best_N.values, best_N.indices == labels_N),
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
