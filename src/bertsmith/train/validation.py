"""How well a model names hidden tokens of text it was not trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bertsmith.batch import MaskedBatch
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.world import World, dealt
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


@torch.no_grad()
def score_masked_lm(
    model: MaskedLM, batches: Sequence[MaskedBatch], compute: Compute, world: World
) -> MaskedScores:
    """Score a model on fixed masks; nothing random is drawn and the model is not changed.

    Ranks share the batches out; each is counted once, and added up in the order of the batches, so
    that the scores do not depend on how many ranks there are.
    """
    counted = [batch for batch in batches if batch.num_targets]
    found_B2 = torch.zeros(len(counted), 2, dtype=torch.float64)  # nats, right answers
    for number, batch in dealt(counted, world):
        world.beat("the validation")
        on_device = batch.to(compute.device)
        with compute.autocast():
            logits_MV = model.logits_MV(on_device.inputs, on_device.positions_M, dropout_seed=None)
        logits_MV = logits_MV.float()
        nats = F.cross_entropy(logits_MV, on_device.targets_M, reduction="sum")
        right = (logits_MV.argmax(-1) == on_device.targets_M).sum()
        if number is not None:
            found_B2[number] = torch.stack([nats.double(), right.double()])
    nats, right = world.sum_tensor(found_B2).sum(0).tolist()
    num_targets = sum(batch.num_targets for batch in counted)
    if num_targets == 0:
        return MaskedScores(loss=math.nan, accuracy=math.nan, num_targets=0)
    return MaskedScores(
        loss=nats / num_targets, accuracy=right / num_targets, num_targets=num_targets
    )
