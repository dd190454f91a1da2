"""Weights of classes, from how many examples each has.

Shape legend: C classes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bertsmith.errors import UserError


def balanced(counts_C: Tensor) -> Tensor:
    """Examples / (classes * examples of the class), as scikit-learn's "balanced".

    Args:
        counts_C: Examples of each class; a class without any weighs as if it had one.

    Returns:
        float64.
    """
    counts_C = counts_C.double().clamp(min=1)
    return counts_C.sum() / (len(counts_C) * counts_C)


def effective(counts_C: Tensor, beta: float) -> Tensor:
    """1 / effective number of examples, scaled to a mean of 1 (Cui et al. 2019).

    The effective number of n examples is (1 - beta^n) / (1 - beta).

    Args:
        counts_C: Examples of each class; a class without any weighs as if it had one.
        beta: In [0, 1); 0 makes all weights 1.

    Returns:
        float64.
    """
    counts_C = counts_C.double().clamp(min=1)
    weights_C = (1.0 - beta) / (1.0 - torch.tensor(beta, dtype=torch.float64) ** counts_C)
    return weights_C * len(counts_C) / weights_C.sum()


def given(by_label: Mapping[str, float], names: Sequence[str]) -> Tensor:
    """Weights that a user named; 1 for other labels, float64.

    Raises:
        UserError: A label that the task has not.
    """
    unknown = [label for label in by_label if label not in names]
    if unknown:
        shown = ", ".join(repr(n) for n in names[:10]) + (", ..." if len(names) > 10 else "")
        raise UserError(
            f"--loss.class_weights: there is no label {unknown[0]!r}; the labels are {shown}"
        )
    return torch.tensor([by_label.get(name, 1.0) for name in names], dtype=torch.float64)
