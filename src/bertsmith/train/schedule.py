"""The learning rate as a pure function of how much of the budget is spent.

Progress runs from 0 to 1 over the budget, whatever its unit: applied steps, tokens, or minutes (the
schedule then fits the time that is left, as in Cramming, Geiping and Goldstein 2022).
"""

import math

from bertsmith.train.config import OptimConfig


def learning_rate(config: OptimConfig, *, progress: float, step: int) -> float:
    """Learning rate of a step.

    Args:
        config: Peak, shape and warm-up.
        progress: Share of the budget spent before this step, 0 to 1.
        step: Updates applied before this step; used when the warm-up is given in steps.
    """
    progress = min(max(progress, 0.0), 1.0)
    if config.warmup_steps is not None:
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
        # The share that those steps took: exact for a budget in steps, else by the pace so far.
        warmed = min(config.warmup_steps * progress / step, 1.0) if step else 0.0
    else:
        warmed = config.warmup_share
        if progress < warmed:
            # Half a step's progress is unknown, so the very first step would have rate 0 and be
            # wasted; a small floor lets it count.
            return config.learning_rate * max(progress / warmed, 1.0 / (step + 100))
    return config.learning_rate * _decay(config, progress, warmed)


def _decay(config: OptimConfig, progress: float, warmed: float) -> float:
    """Factor on the peak after warm-up, 1 down to 0."""
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return (1.0 - progress) / (1.0 - warmed) if warmed < 1.0 else 1.0
        case "cosine":
            share = (progress - warmed) / (1.0 - warmed) if warmed < 1.0 else 0.0
            return 0.5 * (1.0 + math.cos(math.pi * share))
        case "wsd":
            left = 1.0 - progress
            return 1.0 if left >= config.decay_share else left / config.decay_share
