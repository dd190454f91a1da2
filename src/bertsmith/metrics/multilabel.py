"""How well the labels of texts are found that may have any number of them.

Shape legend: N examples, C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bertsmith.metrics.calibration import calibration_error
from bertsmith.metrics.ranking import average_precision, mean_of_defined, roc_auc
from bertsmith.metrics.score_table import ScoreTable

OVERALL = (
    *("macro_f1", "micro_f1", "samples_f1", "weighted_f1", "exact_match"),
    *("average_precision", "roc_auc", "calibration_error", "loss"),
)


@dataclass(frozen=True, kw_only=True)
class MultilabelScore:
    """How well one label is recognised."""

    label: str
    precision: float
    """Share of the texts said to have it that do; 0 if there are none."""

    recall: float
    """Share of the texts that have it which are found; 0 if there are none."""

    f1: float
    """Harmonic mean of the two; 0 if both are."""

    average_precision: float | None
    """Mean precision by recall; None if no text has it."""

    roc_auc: float | None
    """Area under the ROC curve; None if all texts have it, or none."""

    threshold: float
    """Probability over which it is said to be there."""

    support: int
    """Texts that have it."""


@dataclass(frozen=True, kw_only=True)
class MultilabelMetrics:
    """Scores over a whole table."""

    num_examples: int

    macro_f1: float
    """Mean F1 of all labels of the model, with 0 for those that neither occur nor are said to."""

    micro_f1: float
    """F1 of all pairs of a text and a label taken together."""

    samples_f1: float
    """Mean over texts of the F1 of its labels; 0 where it has none and none are found."""

    weighted_f1: float
    """Mean F1 of the labels, weighted by the texts that have them."""

    exact_match: float
    """Share of the texts whose labels are all found and no others."""

    average_precision: float | None
    """Mean of the labels that occur; None if none does."""

    roc_auc: float | None
    """Mean of the labels for which it is defined; None if it is for none."""

    calibration_error: float
    """Expected calibration error of all probabilities (Guo et al. 2017)."""

    loss: float
    """Mean binary log-loss, in nats a text and label."""

    labels: tuple[MultilabelScore, ...]
    """Each label of the model, in its order."""

    def by_name(self) -> dict[str, float]:
        """The overall scores by their names, as they stand in summary.json."""
        values = {name: getattr(self, name) for name in OVERALL}
        return {name: float(value) for name, value in values.items() if value is not None}

    def details(self) -> Mapping[str, object]:
        """Each label."""
        return {"labels": [asdict(score) for score in self.labels]}

    def tables(self) -> Sequence[ScoreTable]:
        """Each label."""
        numbers = ("precision", "recall", "f1", "average_precision", "roc_auc", "threshold")
        rows = []
        for score in self.labels:
            values = [getattr(score, name) for name in numbers]
            shown = ["-" if value is None else f"{value:.3f}" for value in values]
            rows.append((score.label, *shown, f"{score.support:,}"))
        headings = ("label", *(name.replace("_", " ") for name in numbers), "support")
        return (ScoreTable(title="each label", headings=headings, rows=rows),)


def multilabel_metrics(
    logits_NC: Tensor,
    labels_NC: Tensor,
    names: Sequence[str],
    *,
    is_found_NC: Tensor,
    thresholds_C: Sequence[float],
) -> MultilabelMetrics:
    """Scores of a whole table.

    Args:
        logits_NC: Scores whose sigmoid is a probability.
        labels_NC: 1 where a text has a label, else 0, fp32.
        names: Of the labels.
        is_found_NC: Whether a label is said to be there.
        thresholds_C: Probabilities by which it was.

    Raises:
        FloatingPointError: A score is not finite.

    Source:
        The definitions of scikit-learn's metrics with zero_division=0, against which the tests
        check them.
    """
    assert len(labels_NC) > 0, "metrics of no example"
    if not bool(torch.isfinite(logits_NC).all()):
        raise FloatingPointError("the model gives scores that are not finite (NaN or infinity)")
    there_NC, chances_NC = labels_NC > 0, logits_NC.double().sigmoid()
    right_NC = is_found_NC & there_NC
    right_C, found_C, there_C = (x.sum(0).double() for x in (right_NC, is_found_NC, there_NC))
    right_N, found_N, there_N = (x.sum(1).double() for x in (right_NC, is_found_NC, there_NC))
    f1_C = 2 * right_C / (found_C + there_C).clamp(min=1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits_NC.double(), labels_NC.double())
    labels = tuple(
        MultilabelScore(
            label=name,
            precision=float(right_C[c] / found_C[c].clamp(min=1)),
            recall=float(right_C[c] / there_C[c].clamp(min=1)),
            f1=float(f1_C[c]),
            average_precision=average_precision(chances_NC[:, c], there_NC[:, c]),
            roc_auc=roc_auc(chances_NC[:, c], there_NC[:, c]),
            threshold=thresholds_C[c],
            support=int(there_C[c]),
        )
        for c, name in enumerate(names)
    )
    return MultilabelMetrics(
        num_examples=len(labels_NC),
        macro_f1=float(f1_C.mean()),
        micro_f1=float(2 * right_C.sum() / (found_C + there_C).sum().clamp(min=1)),
        samples_f1=float((2 * right_N / (found_N + there_N).clamp(min=1)).mean()),
        weighted_f1=float((f1_C * there_C).sum() / there_C.sum().clamp(min=1)),
        exact_match=float((is_found_NC == there_NC).all(1).double().mean()),
        average_precision=mean_of_defined([score.average_precision for score in labels]),
        roc_auc=mean_of_defined([score.roc_auc for score in labels]),
        calibration_error=calibration_error(chances_NC.flatten(), there_NC.flatten()),
        loss=float(loss),
        labels=labels,
    )
