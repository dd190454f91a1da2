"""One of several classes a text.

Shape legend: N examples, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.labels import label_ids, label_names, stratified_holdout
from bertsmith.data.tables import LabelledTable, label_name
from bertsmith.errors import UserError
from bertsmith.metrics.calibration import best_temperature
from bertsmith.metrics.classification import ClassificationMetrics, classification_metrics
from bertsmith.model.objectives import CrossEntropy, Objective, ProblemType
from bertsmith.tasks import weights
from bertsmith.tasks.config import DecideConfig, LossConfig, TaskName
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.kind import Answer, Said, TaskKind
from bertsmith.tasks.windows import Merge, log_of, merge_windows


def cross_entropy_of(loss: LossConfig, targets: Tensor, names: Sequence[str]) -> CrossEntropy:
    """The loss of classes as a config asks for it.

    Args:
        loss: Of the config.
        targets: Class ids to learn from, int64: some weights follow from how many of each there
            are.
        names: Of the classes.

    Raises:
        UserError: A weight for a label that nobody has.
    """
    counts_C = torch.bincount(targets, minlength=len(names))
    by_label = loss.weight_by_label
    weights_C: Tensor | None = None
    if by_label is not None:
        weights_C = weights.given(by_label, names)
    elif loss.class_weights == "balanced":
        weights_C = weights.balanced(counts_C)
    elif loss.class_weights == "effective":
        weights_C = weights.effective(counts_C, loss.effective_beta)
    return CrossEntropy(
        class_weights_C=None if weights_C is None else tuple(weights_C.tolist()),
        label_smoothing=loss.label_smoothing,
        focal_gamma=loss.focal_gamma,
    )


@dataclass(frozen=True)
class Classification(TaskKind[str]):
    """Targets are class ids, int64."""

    name: ClassVar[TaskName] = "classification"
    problem_type: ClassVar[ProblemType] = "single_label_classification"
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "macro_f1", "loss")
    holdout_said: ClassVar[str] = "each label in proportion"

    def read(self, cells: LabelledTable[object], config: TableConfig) -> LabelledTable[str]:
        """A name a row."""
        column = cells.columns.label_name
        return cells.read_labels(lambda cell: label_name(cell, column), config)

    def output_names(self, table: LabelledTable[str]) -> tuple[str, ...]:
        """The labels."""
        return label_names(table)

    def targets(
        self, table: LabelledTable[str], names: Sequence[str], *, known_from: str
    ) -> Tensor:
        """Ids."""
        return label_ids(table, names, known_from=known_from)

    def holdout(
        self, table: LabelledTable[str], *, share: float, seed: int
    ) -> tuple[list[int], list[int]]:
        """Each label in proportion."""
        return stratified_holdout(table.labels, share=share, seed=seed)

    def objective(self, loss: LossConfig, targets: Tensor, names: Sequence[str]) -> Objective:
        """Cross-entropy."""
        return cross_entropy_of(loss, targets, names)

    def check_decide(self, config: DecideConfig) -> None:
        """The likeliest class is the answer: there is no threshold."""
        if config.thresholds != "half":
            raise UserError(
                "--decide.thresholds tuned: is for several labels a text; of classes the likeliest "
                "one is the answer"
            )

    def merged(self, logits_WC: Tensor, owners_W: Tensor, *, merge: Merge) -> Tensor:
        """Of the classes' probabilities; the largest are scaled to add up to 1."""
        return merge_windows(
            logits_WC,
            owners_W,
            merge=merge,
            chances_of=lambda logits: logits.softmax(1),
            logits_of=log_of,
        )

    def decide(self, config: DecideConfig, logits_NC: Tensor, targets: Tensor) -> Decisions:
        """A temperature."""
        if not config.calibrate:
            return Decisions()
        logits_NC = logits_NC.double()

        def nats_at(temperature: float) -> float:
            return float(torch.nn.functional.cross_entropy(logits_NC / temperature, targets))

        return Decisions(temperature=best_temperature(nats_at))

    def metrics(
        self, logits_NC: Tensor, targets: Tensor, names: Sequence[str], decisions: Decisions
    ) -> ClassificationMetrics:
        """Of the likeliest class."""
        return classification_metrics(decisions.scaled(logits_NC), targets, names)

    def answers(
        self, logits_NC: Tensor, names: Sequence[str], decisions: Decisions
    ) -> list[Answer]:
        """The likeliest class."""
        chances_NC = decisions.scaled(logits_NC).softmax(1)
        best_N = chances_NC.argmax(1).tolist()
        return [
            Answer(said=names[best], chances=chances)
            for best, chances in zip(best_N, chances_NC.tolist(), strict=True)
        ]

    def truths(self, targets: Tensor, names: Sequence[str]) -> list[Said]:
        """Names."""
        return [names[label] for label in targets.tolist()]

    def row_losses(self, logits_NC: Tensor, targets: Tensor, decisions: Decisions) -> Tensor:
        """Log-loss of the true class, in nats."""
        logits_NC = decisions.scaled(logits_NC.double())
        return torch.nn.functional.cross_entropy(logits_NC, targets, reduction="none")

    def describe(self, names: Sequence[str]) -> str:
        """How many classes."""
        return f"classifier with {len(names)} labels"

    def warnings(self, targets: Tensor, names: Sequence[str], *, what: str) -> list[str]:
        """One class alone says little."""
        present = sorted(set(targets.tolist()))
        if len(present) > 1:
            return []
        return [
            f"warning: {what} all have the label {names[present[0]]!r}: their scores say little, "
            "and roc_auc is not defined"
        ]
