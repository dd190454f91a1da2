"""Scores over a whole table, computed offline; scikit-learn and scipy check them in the tests."""

from bertsmith.metrics.classification import (
    HIGHER_IS_BETTER,
    ClassificationMetrics,
    ClassificationTally,
)
from bertsmith.metrics.score_table import Metrics, ScoreTable

LOWER_IS_BETTER = ("loss", "mse", "mae", "calibration_error")
"""The metrics of any task that are errors."""

__all__ = [
    "HIGHER_IS_BETTER",
    "LOWER_IS_BETTER",
    "ClassificationMetrics",
    "ClassificationTally",
    "Metrics",
    "ScoreTable",
]
