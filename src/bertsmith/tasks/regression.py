"""A number a text, learned by squared error.

Shape legend: N examples, C = 1 output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.scores import hashed_holdout, read_score, scores_of
from bertsmith.data.tables import LabelledTable
from bertsmith.errors import UserError
from bertsmith.metrics.regression import RegressionMetrics, regression_metrics
from bertsmith.model.objectives import Objective, ProblemType, SquaredError
from bertsmith.tasks.config import DecideConfig, LossConfig, TaskName
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.kind import Answer, Said, TaskKind, nothing_to_weigh
from bertsmith.tasks.windows import Merge, merge_windows


@dataclass(frozen=True)
class Regression(TaskKind[float]):
    """Targets are numbers, fp32."""

    name: ClassVar[TaskName] = "regression"
    problem_type: ClassVar[ProblemType] = "regression"
    headline: ClassVar[tuple[str, ...]] = ("spearman", "pearson", "mse")
    holdout_said: ClassVar[str] = "by a hash of each text"
    has_chances: ClassVar[bool] = False

    def read(self, cells: LabelledTable[object], config: TableConfig) -> LabelledTable[float]:
        """A number a row."""
        column = cells.columns.label_name
        return cells.read_labels(lambda cell: read_score(cell, column), config)

    def output_names(self, table: LabelledTable[float]) -> tuple[str, ...]:
        """The name of the column."""
        if len(set(table.labels)) == 1:
            raise UserError(
                f"{table.path}: every row has the score {table.labels[0]:g}; there is nothing to "
                "learn"
            )
        return (table.columns.label_name,)

    def targets(
        self, table: LabelledTable[float], names: Sequence[str], *, known_from: str
    ) -> Tensor:
        """The numbers."""
        return scores_of(table)

    def holdout(
        self, table: LabelledTable[float], *, share: float, seed: int
    ) -> tuple[list[int], list[int]]:
        """By a hash of the text."""
        return hashed_holdout(table, share=share, seed=seed)

    def objective(self, loss: LossConfig, targets: Tensor, names: Sequence[str]) -> Objective:
        """Squared error."""
        if not loss.is_plain:
            raise nothing_to_weigh(loss, task=self.name)
        return SquaredError()

    def check_decide(self, config: DecideConfig) -> None:
        """A number is its own answer."""
        if config != DecideConfig():
            raise UserError("--decide: is for tasks with labels, and this is regression")

    def merged(self, logits_WC: Tensor, owners_W: Tensor, *, merge: Merge) -> Tensor:
        """Of the numbers themselves."""
        return merge_windows(
            logits_WC,
            owners_W,
            merge=merge,
            chances_of=lambda numbers: numbers,
            logits_of=lambda numbers: numbers,
        )

    def decide(self, config: DecideConfig, logits_NC: Tensor, targets: Tensor) -> Decisions:
        """Nothing to decide."""
        return Decisions()

    def metrics(
        self, logits_NC: Tensor, targets: Tensor, names: Sequence[str], decisions: Decisions
    ) -> RegressionMetrics:
        """Correlations and errors."""
        if not bool(torch.isfinite(logits_NC).all()):
            raise FloatingPointError("the model gives scores that are not finite (NaN or infinity)")
        return regression_metrics(logits_NC[:, 0], targets)

    def answers(
        self, logits_NC: Tensor, names: Sequence[str], decisions: Decisions
    ) -> list[Answer]:
        """The number."""
        return [Answer(said=score, chances=()) for score in logits_NC[:, 0].tolist()]

    def truths(self, targets: Tensor, names: Sequence[str]) -> list[Said]:
        """The numbers."""
        return list(targets.tolist())

    def row_losses(self, logits_NC: Tensor, targets: Tensor, decisions: Decisions) -> Tensor:
        """Squared error."""
        return (logits_NC[:, 0].double() - targets.double()).square()

    def describe(self, names: Sequence[str]) -> str:
        """Of what."""
        return f"regression of {names[0]!r}"

    def warnings(self, targets: Tensor, names: Sequence[str], *, what: str) -> list[str]:
        """Without a spread there is no correlation."""
        if float(targets.min()) < float(targets.max()):
            return []
        return [f"warning: {what} all have the score {float(targets[0]):g}: correlations are 0"]
