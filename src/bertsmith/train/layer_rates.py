"""A learning rate for each part of a model, and from which update on a part is trained.

Imports neither torch nor numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertsmith.model.parts import EMBEDDINGS, HEAD, read_rates, spread
from bertsmith.train.config import OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlan:
    """How a part is trained."""

    share: float
    """Its learning rate over that of the schedule."""

    begins: int
    """Updates of the run before its first."""


def plan_parts(
    config: OptimConfig, parts: Sequence[str], *, updates_per_epoch: int | None = None
) -> dict[str, PartPlan]:
    """How each part of a model is trained.

    With a layer decay X, the head has the full rate, the last of N layers X times that, layer i
    (from 0) X^(N - i) and the embeddings X^(N + 1) (Howard and Ruder 2018, discriminative
    fine-tuning; one factor a layer as in ELECTRA's optimizer).

    Unfreezing goes from the head down, one layer at a time, the embeddings last (Howard and Ruder
    2018, gradual unfreezing).

    Args:
        config: The optimizer's.
        parts: Of the model, as `model.parts.parts_of` gives them.
        updates_per_epoch: None: the run does not count epochs.

    Raises:
        ValueError: The config names parts that are not there, or epochs that nobody counts.
    """
    layers = [part for part in parts if part not in (EMBEDDINGS, HEAD)]
    num_layers = 1 + int(layers[-1]) if layers else 0
    depth_of = _depths(num_layers)
    shares = _shares(config, depth_of, num_layers=num_layers)
    every = _updates_between(config, updates_per_epoch)
    return {
        part: PartPlan(share=shares.get(part, 1.0), begins=every * depth_of[part]) for part in parts
    }


def _depths(num_layers: int) -> dict[str, int]:
    """How far below the head each part is."""
    layers = {str(i): num_layers - i for i in range(num_layers)}
    return {HEAD: 0, **layers, EMBEDDINGS: num_layers + 1}


def _shares(
    config: OptimConfig, depth_of: Mapping[str, int], *, num_layers: int
) -> dict[str, float]:
    if config.layer_decay is not None:
        return {part: config.layer_decay**depth for part, depth in depth_of.items()}
    if config.rates is None:
        return {}
    rates = read_rates(config.rates)
    spread([span for span, _ in rates], num_layers=num_layers)  # each there, and once
    return {
        part: rate / config.learning_rate
        for span, rate in rates
        for part in spread([span], num_layers=num_layers)
    }


def _updates_between(config: OptimConfig, updates_per_epoch: int | None) -> int:
    """Updates from one part's first to the next one's; 0: all are trained from the start."""
    if config.unfreeze is None:
        return 0
    unit, _, number = config.unfreeze.partition(":")
    if unit == "steps":
        return int(number)
    if updates_per_epoch is None:
        raise ValueError(f"{config.unfreeze}: this run has no epochs; give steps:N")
    return max(1, math.ceil(float(number) * updates_per_epoch))
