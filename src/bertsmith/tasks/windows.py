"""From the windows of a long text to one answer.

Shape legend: W windows, N texts, C labels.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Merge = Literal["mean", "max"]

LEAST_CHANCE = 1e-15
"""Below this, and as near to 1, a probability is not told from it: its logit would be infinite."""


def merge_windows(
    logits_WC: Tensor,
    owners_W: Tensor,
    *,
    merge: Merge,
    chances_of: Callable[[Tensor], Tensor],
    logits_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scores of texts from those of their windows, fp32, N x C.

    A text of one window keeps its scores to the bit. Of several, probabilities are merged, and the
    result is given as the scores which have those probabilities, so that all that follows
    (temperature, thresholds, metrics) goes on as with short texts.

    Args:
        logits_WC: Scores, fp32.
        owners_W: The text of each window, ascending, every text at least once.
        merge: mean or max, of each label's probability.
        chances_of: Probabilities of scores, in float64.
        logits_of: Scores of probabilities.
    """
    counts_N = owners_W.bincount()
    if len(counts_N) == len(owners_W):
        return logits_WC
    chances_WC = chances_of(logits_WC.double())
    shape = (len(counts_N), logits_WC.shape[1])
    index_WC = owners_W[:, None].expand(chances_WC.shape)
    merged_NC = torch.zeros(shape, dtype=torch.float64).scatter_reduce(
        0, index_WC, chances_WC, "mean" if merge == "mean" else "amax", include_self=False
    )
    logits_NC = logits_of(merged_NC).to(logits_WC.dtype)
    is_alone_W = counts_N[owners_W] == 1
    logits_NC[owners_W[is_alone_W]] = logits_WC[is_alone_W]
    return logits_NC


def log_of(chances_NC: Tensor) -> Tensor:
    """Scores whose softmax is these probabilities, or those in proportion to them."""
    return chances_NC.clamp_min(LEAST_CHANCE).log()


def logit_of(chances_NC: Tensor) -> Tensor:
    """Scores whose sigmoid is these probabilities."""
    return chances_NC.clamp(LEAST_CHANCE, 1.0 - LEAST_CHANCE).logit()
