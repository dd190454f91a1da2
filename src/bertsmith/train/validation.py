"""How well a model names hidden tokens of text it was not trained on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bertsmith.batch import MaskedBatch
from bertsmith.model.heads import MaskedLM
from bertsmith.train.precision import Compute


@dataclass(frozen=True, kw_only=True)
class MaskedScores:
    """Scores over every target of a validation set."""

    loss: float
    """Nats a target."""

    accuracy: float
    """Share of targets whose most likely token is the right one."""

    num_targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


@torch.inference_mode()
def score_masked_lm(
    model: MaskedLM, batches: Iterable[MaskedBatch], compute: Compute
) -> MaskedScores:
    """Score a model on fixed masks; nothing random is drawn and the model is not changed."""
    nats = torch.zeros((), dtype=torch.float64, device=compute.device)
    right = torch.zeros((), dtype=torch.int64, device=compute.device)
    num_targets = 0
    for batch in batches:
        if batch.num_targets == 0:
            continue
        on_device = batch.to(compute.device)
        with compute.autocast():
            logits_MV = model.logits_MV(on_device.inputs, on_device.positions_M, dropout_seed=None)
        logits_MV = logits_MV.float()
        nats += F.cross_entropy(logits_MV, on_device.targets_M, reduction="sum").double()
        right += (logits_MV.argmax(-1) == on_device.targets_M).sum()
        num_targets += batch.num_targets
    if num_targets == 0:
        return MaskedScores(loss=math.nan, accuracy=math.nan, num_targets=0)
    return MaskedScores(
        loss=float(nats) / num_targets,
        accuracy=float(right) / num_targets,
        num_targets=num_targets,
    )
