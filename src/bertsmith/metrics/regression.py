"""How near predicted numbers are to the true ones.

Shape legend: N examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.metrics.score_table import ScoreTable


@dataclass(frozen=True, kw_only=True)
class RegressionMetrics:
    """Scores over a whole table."""

    num_examples: int

    spearman: float
    """Rank correlation, ties by their mean rank; 0 if either side is all the same."""

    pearson: float
    """Linear correlation; 0 if either side is all the same."""

    mse: float
    """Mean squared error."""

    mae: float
    """Mean absolute error."""

    def by_name(self) -> dict[str, float]:
        """The scores by their names; the loss is the mean squared error."""
        return {
            "spearman": self.spearman,
            "pearson": self.pearson,
            "mse": self.mse,
            "mae": self.mae,
            "loss": self.mse,
        }

    def details(self) -> Mapping[str, object]:
        """Nothing besides."""
        return {}

    def tables(self) -> Sequence[ScoreTable]:
        """Nothing besides."""
        return ()


def regression_metrics(predicted_N: Tensor, true_N: Tensor) -> RegressionMetrics:
    """Scores of predictions; computed in float64."""
    assert len(true_N) > 0, "metrics of no example"
    predicted_N, true_N = predicted_N.double(), true_N.double()
    errors_N = predicted_N - true_N
    return RegressionMetrics(
        num_examples=len(true_N),
        spearman=correlation(mean_ranks(predicted_N), mean_ranks(true_N)),
        pearson=correlation(predicted_N, true_N),
        mse=float(errors_N.square().mean()),
        mae=float(errors_N.abs().mean()),
    )


def correlation(left_N: Tensor, right_N: Tensor) -> float:
    """Pearson's r, in [-1, 1]; 0 if either side is all the same."""
    if bool((left_N == left_N[0]).all()) or bool((right_N == right_N[0]).all()):
        return 0.0
    left_N, right_N = left_N - left_N.mean(), right_N - right_N.mean()
    norms = left_N.norm() * right_N.norm()
    return float(((left_N @ right_N) / norms).clamp(-1.0, 1.0))


def mean_ranks(values_N: Tensor) -> Tensor:
    """Ranks from 1, float64; equal values share the mean of theirs."""
    _, place_N, counts = torch.unique(values_N, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks_N: Tensor = (last - (counts.double() - 1.0) / 2.0)[place_N]
    return ranks_N
