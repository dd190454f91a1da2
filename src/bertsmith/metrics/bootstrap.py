"""How far scores might be off because the table is a sample: bootstrap confidence intervals.

Source:
    Efron (1979): rows are drawn with replacement, as many as there are, and scored again; the
    interval is from percentile to percentile of the scores.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.95


def intervals(
    scores_of: Callable[[Tensor], Mapping[str, float]],
    *,
    num_rows: int,
    num_samples: int,
    seed: int,
    confidence: float = CONFIDENCE,
) -> dict[str, tuple[float, float]]:
    """From and to of each score; of one that some samples leave undefined, over the others.

    Args:
        scores_of: Scores of some rows, by name; a row may stand there more than once.
        num_rows: Rows of the table.
        num_samples: Tables to draw.
        seed: What is drawn follows from it.
        confidence: Share of the samples within an interval.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    found: dict[str, list[float]] = {}
    for _ in range(num_samples):
        rows_N = torch.from_numpy(generator.integers(0, num_rows, num_rows))
        for name, value in scores_of(rows_N).items():
            found.setdefault(name, []).append(value)
    tail = (1.0 - confidence) / 2.0
    bounds = {name: np.quantile(values, [tail, 1.0 - tail]) for name, values in found.items()}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
