"""Any number of labels a text, each learned as a yes or no of its own.

Shape legend: N examples, C labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.label_sets import (
    LabelSet,
    label_set_holdout,
    multi_hot,
    read_label_columns,
    read_label_list,
    set_names,
)
from bertsmith.data.tables import LabelledTable
from bertsmith.errors import UserError
from bertsmith.metrics.calibration import best_temperature
from bertsmith.metrics.multilabel import MultilabelMetrics, multilabel_metrics
from bertsmith.model.objectives import BinaryCrossEntropy, Objective, ProblemType
from bertsmith.tasks import weights
from bertsmith.tasks.config import DecideConfig, LossConfig, TaskName
from bertsmith.tasks.decisions import HALF, Decisions, best_threshold
from bertsmith.tasks.kind import Answer, Said, TaskKind
from bertsmith.tasks.windows import Merge, logit_of, merge_windows


@dataclass(frozen=True)
class Multilabel(TaskKind[LabelSet]):
    """Targets are 0 or 1 a label, fp32, N x C."""

    label_separator: str | None = None

    name: ClassVar[TaskName] = "multilabel"
    problem_type: ClassVar[ProblemType] = "multi_label_classification"
    headline: ClassVar[tuple[str, ...]] = ("average_precision", "macro_f1", "loss")
    holdout_said: ClassVar[str] = "each label about in proportion"

    def read(self, cells: LabelledTable[object], config: TableConfig) -> LabelledTable[LabelSet]:
        """The names of a row's labels."""
        columns = cells.columns
        if columns.labels:
            names = [columns.names[i] for i in columns.labels]
            return cells.read_labels(lambda cell: read_label_columns(cell, names), config)
        separator = config.label_separator or self.label_separator
        return cells.read_labels(
            lambda cell: read_label_list(cell, columns.label_name, separator=separator), config
        )

    def output_names(self, table: LabelledTable[LabelSet]) -> tuple[str, ...]:
        """The labels; in the order of their columns where each has one."""
        found = set_names(table)
        columns = table.columns
        if not columns.labels:
            return found
        names = tuple(columns.names[i] for i in columns.labels)
        missing = [name for name in names if name not in found]
        if missing:
            raise UserError(
                f"{table.path}: no row has the label {missing[0]!r}; leave the column out of "
                "--table.label_columns"
            )
        return names

    def targets(
        self, table: LabelledTable[LabelSet], names: Sequence[str], *, known_from: str
    ) -> Tensor:
        """0 or 1 a label."""
        return multi_hot(table, names, known_from=known_from)

    def holdout(
        self, table: LabelledTable[LabelSet], *, share: float, seed: int
    ) -> tuple[list[int], list[int]]:
        """Each label about in proportion."""
        return label_set_holdout(table.labels, share=share, seed=seed)

    def objective(self, loss: LossConfig, targets: Tensor, names: Sequence[str]) -> Objective:
        """Binary cross-entropy.

        Balanced and effective weights are those of the two classes of each label, there and not
        there. A weight that is given is that of a label which is there (torch's `pos_weight`).
        """
        there_C = targets.double().sum(0)
        counts_2C = torch.stack([there_C, len(targets) - there_C])
        by_label = loss.weight_by_label
        pairs: list[Tensor] | None = None
        if by_label is not None:
            present_C = weights.given(by_label, names)
            pairs = [torch.stack([w, torch.ones_like(w)]) for w in present_C]
        elif loss.class_weights == "balanced":
            pairs = [weights.balanced(counts_2) for counts_2 in counts_2C.T]
        elif loss.class_weights == "effective":
            pairs = [weights.effective(counts_2, loss.effective_beta) for counts_2 in counts_2C.T]
        return BinaryCrossEntropy(
            present_weights_C=None if pairs is None else tuple(float(p[0]) for p in pairs),
            absent_weights_C=None if pairs is None else tuple(float(p[1]) for p in pairs),
            label_smoothing=loss.label_smoothing,
            focal_gamma=loss.focal_gamma,
        )

    def merged(self, logits_WC: Tensor, owners_W: Tensor, *, merge: Merge) -> Tensor:
        """Of each label's probability."""
        return merge_windows(
            logits_WC, owners_W, merge=merge, chances_of=torch.sigmoid, logits_of=logit_of
        )

    def decide(self, config: DecideConfig, logits_NC: Tensor, targets: Tensor) -> Decisions:
        """A temperature for all labels, then a threshold for each."""
        temperature = 1.0
        if config.calibrate:
            wide_NC, targets_NC = logits_NC.double(), targets.double()

            def nats_at(at: float) -> float:
                return float(F.binary_cross_entropy_with_logits(wide_NC / at, targets_NC))

            temperature = best_temperature(nats_at)
        if config.thresholds == "half":
            return Decisions(temperature=temperature)
        chances_NC = Decisions(temperature=temperature).scaled(logits_NC).sigmoid()
        thresholds_C = [
            best_threshold(chances_N, there_N > 0)
            for chances_N, there_N in zip(chances_NC.T, targets.T, strict=True)
        ]
        return Decisions(temperature=temperature, thresholds_C=tuple(thresholds_C))

    def metrics(
        self, logits_NC: Tensor, targets: Tensor, names: Sequence[str], decisions: Decisions
    ) -> MultilabelMetrics:
        """Of the labels over their thresholds."""
        logits_NC = decisions.scaled(logits_NC)
        return multilabel_metrics(
            logits_NC,
            targets,
            names,
            is_found_NC=decisions.is_over(logits_NC.sigmoid()),
            thresholds_C=decisions.thresholds_C or [HALF] * len(names),
        )

    def answers(
        self, logits_NC: Tensor, names: Sequence[str], decisions: Decisions
    ) -> list[Answer]:
        """The labels over their thresholds."""
        chances_NC = decisions.scaled(logits_NC).sigmoid()
        said = self.truths(decisions.is_over(chances_NC), names)
        return [
            Answer(said=labels, chances=chances)
            for labels, chances in zip(said, chances_NC.tolist(), strict=True)
        ]

    def truths(self, targets: Tensor, names: Sequence[str]) -> list[Said]:
        """Names."""
        return [
            [name for name, is_there in zip(names, row, strict=True) if is_there]
            for row in targets.tolist()
        ]

    def row_losses(self, logits_NC: Tensor, targets: Tensor, decisions: Decisions) -> Tensor:
        """Log-loss, in nats a label."""
        logits_NC = decisions.scaled(logits_NC.double())
        nats_NC = F.binary_cross_entropy_with_logits(logits_NC, targets.double(), reduction="none")
        return nats_NC.mean(1)

    def describe(self, names: Sequence[str]) -> str:
        """How many labels."""
        return f"classifier with {len(names)} labels, any number of them a text"

    def warnings(self, targets: Tensor, names: Sequence[str], *, what: str) -> list[str]:
        """What cannot be judged."""
        absent = [name for name, n in zip(names, targets.sum(0).tolist(), strict=True) if n == 0]
        if not absent:
            return []
        shown = ", ".join(repr(name) for name in absent[:5]) + (", ..." if len(absent) > 5 else "")
        return [
            f"warning: {len(absent)} of {len(names)} labels have no example among {what} ({shown}):"
            " each counts as an F1 of 0, and keeps a threshold of a half"
        ]
