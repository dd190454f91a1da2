"""How well scores order what is so before what is not: ROC-AUC and average precision.

Both count ties as scikit-learn does: equal scores are one threshold.

Shape legend: N examples, K distinct scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def roc_auc(scores_N: Tensor, is_so_N: Tensor) -> float | None:
    """Chance that something that is so scores above something that is not; ties count half.

    None if all are so, or none.
    """
    wrong_K, right_K = _by_threshold(scores_N, is_so_N)
    num_right, num_wrong = float(right_K.sum()), float(wrong_K.sum())
    if not num_right or not num_wrong:
        return None
    above_K = right_K.cumsum(0) - right_K  # from the highest score down
    return float((wrong_K * (above_K + right_K / 2)).sum() / (num_right * num_wrong))


def average_precision(scores_N: Tensor, is_so_N: Tensor) -> float | None:
    """Precision at each threshold, weighted by the recall it adds; None if nothing is so."""
    wrong_K, right_K = _by_threshold(scores_N, is_so_N)
    num_right = float(right_K.sum())
    if not num_right:
        return None
    found_K, taken_K = right_K.cumsum(0), (right_K + wrong_K).cumsum(0)
    return float((right_K * found_K / taken_K).sum() / num_right)


def mean_of_defined(values: Sequence[float | None]) -> float | None:
    """The mean of those that are defined; None if none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _by_threshold(scores_N: Tensor, is_so_N: Tensor) -> tuple[Tensor, Tensor]:
    """How many are not so, and so, at each distinct score, from the highest; float64."""
    _, place_N = torch.unique(-scores_N, return_inverse=True)
    right_N = is_so_N.double()
    counts = torch.zeros(2, int(place_N.max()) + 1 if len(place_N) else 1, dtype=torch.float64)
    counts[0].index_add_(0, place_N, 1.0 - right_N)
    counts[1].index_add_(0, place_N, right_N)
    return counts[0], counts[1]
