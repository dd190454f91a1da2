"""What a head's scores are learned to be: each objective owns a loss, as a sum.

Which one it is follows from the task, never from the type of a label's tensor. Each is the loss
that the sequence classifier of `transformers` has for its `problem_type`, and weights, focal
factor and smoothing are as in torch's `cross_entropy` and `binary_cross_entropy_with_logits`. A
weighted mean divides by the sum of the weights: `weights` gives them, and the step divides.

Shape legend: N sequences, C classes or labels.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ProblemType = Literal[
    "single_label_classification", "multi_label_classification", "regression", "sentence_embedding"
]
"""The names in a `config.json`; the last is ours, since such a model has no head there."""

SMALLEST_MISS = 1e-12
"""The focal factor's slope at a probability of exactly 1 would be infinite for a gamma under 1."""


class Objective(Protocol):
    """A loss of sequences."""

    @property
    def problem_type(self) -> ProblemType:
        """Its name in a `config.json`."""
        ...

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """The loss summed over the sequences, a scalar with a gradient; 0 where there are none.

        Args:
            logits_NC: Scores, fp32.
            labels_N: The sequences' targets.
        """
        ...

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """Weight of each term of the loss, float64, shaped like the targets; None: 1 each."""
        ...


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """One of C classes; targets are class ids, int64."""

    class_weights_C: tuple[float, ...] | None = None
    """Weight of each class; None: 1."""

    label_smoothing: float = 0.0
    """Share of a target that is spread over all classes (Szegedy et al. 2016)."""

    focal_gamma: float = 0.0
    """Power of 1 - p that a target's loss is multiplied by (Lin et al. 2017); 0: none."""

    @property
    def problem_type(self) -> ProblemType:
        """As `transformers` calls it."""
        return "single_label_classification"

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed cross-entropy."""
        weights_C = None
        if self.class_weights_C is not None:
            weights_C = torch.tensor(self.class_weights_C, device=logits_NC.device)
        if self.focal_gamma == 0.0:
            return F.cross_entropy(
                logits_NC,
                labels_N,
                weight=weights_C,
                label_smoothing=self.label_smoothing,
                reduction="sum",
            )
        nats_N = F.cross_entropy(logits_NC, labels_N, reduction="none")
        weighted_N = nats_N if weights_C is None else nats_N * weights_C[labels_N]
        return (weighted_N * _focal_factor(nats_N, self.focal_gamma)).sum()

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """The weight of each target's class."""
        if self.class_weights_C is None:
            return None
        return torch.tensor(self.class_weights_C, dtype=torch.float64)[labels_N]


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy:
    """Any number of C labels; targets are 0 or 1 a label, fp32, shape N x C."""

    present_weights_C: tuple[float, ...] | None = None
    """Weight of a term whose label is there; None: 1."""

    absent_weights_C: tuple[float, ...] | None = None
    """Weight of a term whose label is not there; given if the others are."""

    label_smoothing: float = 0.0
    """How far 0 and 1 are moved towards a half: by this share of the way."""

    focal_gamma: float = 0.0
    """As in `CrossEntropy`, with the probability of what is so."""

    @property
    def problem_type(self) -> ProblemType:
        """As `transformers` calls it."""
        return "multi_label_classification"

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed over sequences and labels."""
        targets_NC = labels_N
        if self.label_smoothing:
            targets_NC = labels_N * (1.0 - self.label_smoothing) + self.label_smoothing / 2
        weights_NC = self.weights(labels_N)
        terms_NC = F.binary_cross_entropy_with_logits(
            logits_NC,
            targets_NC,
            weight=None if weights_NC is None else weights_NC.to(logits_NC.dtype),
            reduction="none",
        )
        if self.focal_gamma:
            nats_NC = F.binary_cross_entropy_with_logits(logits_NC, labels_N, reduction="none")
            terms_NC = terms_NC * _focal_factor(nats_NC, self.focal_gamma)
        return terms_NC.sum()

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """The weight of each label that is there, or not there."""
        if self.present_weights_C is None or self.absent_weights_C is None:
            return None
        present_C, absent_C = (
            torch.tensor(weights, dtype=torch.float64, device=labels_N.device)
            for weights in (self.present_weights_C, self.absent_weights_C)
        )
        return torch.where(labels_N > 0, present_C, absent_C)


@dataclass(frozen=True, kw_only=True)
class SquaredError:
    """A number; targets are fp32, and there is one score a sequence."""

    @property
    def problem_type(self) -> ProblemType:
        """As `transformers` calls it."""
        return "regression"

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed squared error."""
        return F.mse_loss(logits_NC[:, 0], labels_N, reduction="sum")

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """All alike."""
        return None


def plain_objective(problem_type: ProblemType) -> Objective:
    """The objective of a problem type, without weights and the like."""
    match problem_type:
        case "single_label_classification":
            return CrossEntropy()
        case "multi_label_classification":
            return BinaryCrossEntropy()
        case "regression":
            return SquaredError()
        case "sentence_embedding":
            raise AssertionError("an embedder's loss follows from its table")


def _focal_factor(nats: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma, from -ln p."""
    missed: Tensor = (-torch.expm1(-nats)).clamp(min=SMALLEST_MISS)
    return missed**gamma
