"""How well a model names hidden tokens of text it was not trained on, and judges pairs of it.

Shape legend: M masked positions, P pairs, V vocabulary, G groups of token types.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import MaskedBatch
from bertsmith.model.heads import MaskedLM, PairedLM
from bertsmith.parallel.world import World, dealt, never
from bertsmith.train.precision import Compute


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """Scores over some targets, such as those of some token types."""

    loss: float
    """Nats a target; NaN where there is none."""

    accuracy: float
    """Share of targets whose most likely answer is the right one; NaN where there is none."""

    num_targets: int


@dataclass(frozen=True, kw_only=True)
class TypeGroups:
    """Token types in groups that are scored by themselves, too."""

    names: Sequence[str]
    """Of the groups."""

    group_V: Tensor
    """Each id's number in `names`; -1: in none."""


NO_GROUPS = TypeGroups(names=(), group_V=torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class MaskedScores(GroupScores):
    """Scores over every target of a validation set."""

    groups: Mapping[str, GroupScores] = field(default_factory=dict)
    """The same by groups of types."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


@torch.no_grad()
def score_masked_lm(
    model: MaskedLM,
    batches: Sequence[MaskedBatch],
    compute: Compute,
    world: World,
    *,
    groups: TypeGroups = NO_GROUPS,
    max_tokens: int | None = None,
    stop_asked: Callable[[], bool] = never,
) -> MaskedScores:
    """Score a model on fixed masks; nothing random is drawn and the model is not changed.

    Ranks share the batches out; each is counted once, and added up in the order of the batches, so
    that the scores do not depend on how many ranks there are.

    Args:
        model: To be scored.
        batches: The same on every rank.
        compute: Device and format.
        world: The ranks.
        groups: Of token types, by that of the target.
        max_tokens: Of one pass, as in training; None passes each batch in one piece.
        stop_asked: Whether this rank was told to stop, asked before each batch.

    Raises:
        AbandonedError: `stop_asked` was true on a rank.
    """
    counted = [batch for batch in batches if batch.num_targets]
    # Of each batch: all targets, then those of each group; their number, nats, right answers.
    found_BG3 = torch.zeros(len(counted), 1 + len(groups.names), 3, dtype=torch.float64)
    for number, batch in dealt(counted, world, stop_asked=stop_asked):
        world.beat("the validation")
        for part in [batch] if max_tokens is None else batch.cut(max_tokens):
            scored_G3 = _scored_G3(model, part, groups, compute)
            if number is not None:
                found_BG3[number] += scored_G3
    whole, *by_group = (_scores(*row) for row in world.sum_tensor(found_BG3).sum(0).tolist())
    return MaskedScores(
        loss=whole.loss,
        accuracy=whole.accuracy,
        num_targets=whole.num_targets,
        groups=dict(zip(groups.names, by_group, strict=True)),
    )


@torch.no_grad()
def score_pairs(
    model: PairedLM,
    batches: Sequence[MaskedBatch],
    compute: Compute,
    world: World,
    *,
    max_tokens: int | None = None,
    stop_asked: Callable[[], bool] = never,
) -> GroupScores:
    """Score a model on fixed pairs of segments; arguments and errors as of `score_masked_lm`."""
    found_B3 = torch.zeros(len(batches), 3, dtype=torch.float64)
    for number, batch in dealt(batches, world, stop_asked=stop_asked):
        world.beat("the validation")
        for part in [batch] if max_tokens is None else batch.cut(max_tokens):
            assert part.pairs is not None, "batches of pairs"
            with compute.autocast():
                logits_P2 = model.pair_logits_P2(part.to(compute.device)).float().cpu()
            labels_P = part.pairs.labels_P
            if number is not None:
                found_B3[number, 0] += len(labels_P)
                found_B3[number, 1] += F.cross_entropy(logits_P2, labels_P, reduction="sum")
                found_B3[number, 2] += (logits_P2.argmax(-1) == labels_P).sum()
    return _scores(*world.sum_tensor(found_B3).sum(0).tolist())


def _scores(num_targets: float, nats: float, right: float) -> GroupScores:
    if num_targets == 0:
        return GroupScores(loss=math.nan, accuracy=math.nan, num_targets=0)
    return GroupScores(
        loss=nats / num_targets, accuracy=right / num_targets, num_targets=int(num_targets)
    )


def _scored_G3(model: MaskedLM, batch: MaskedBatch, groups: TypeGroups, compute: Compute) -> Tensor:
    """Number of targets, summed loss and right answers; of all, and of each group. On the CPU."""
    with compute.autocast():
        nats_M, right_M = model.nats_and_right_M(batch.to(compute.device))
    found_M3 = torch.stack([torch.ones_like(nats_M), nats_M, right_M.float()], 1).cpu().double()
    scored_G3 = torch.zeros(1 + len(groups.names), 3, dtype=torch.float64)
    scored_G3[0] = found_M3.sum(0)
    if groups.names:
        group_M = groups.group_V[batch.targets_M]
        in_one_M = group_M >= 0
        scored_G3[1:].index_add_(0, group_M[in_one_M], found_M3[in_one_M])
    return scored_G3
