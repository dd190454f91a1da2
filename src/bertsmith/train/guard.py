"""When a step's numbers have gone wrong, and what follows: stop, pass the step over, or go back."""

import math
import statistics
from collections.abc import Sequence

SPIKE_WINDOW, SPIKE_HISTORY = 64, 32
"""Losses that are looked back on, and the fewest that a spike can be told from."""

DEVIATION_OF_MEDIAN = 1.4826
"""Turns the median distance from the median into a standard deviation, for a normal spread."""

SMALLEST_SPREAD = 0.01
"""Share of the median below which losses are never called spread: a flat curve has no spikes."""

BAD_STEP_WINDOW = 1000
"""Steps within which `GuardConfig.patience` bad ones are too many."""


class BadStepError(Exception):
    """A step's numbers have gone wrong; weights and moments have not been touched."""

    def __init__(
        self, *, step: int, pack: int | None, what: str, how: str, is_spike: bool = False
    ) -> None:
        """Remember where.

        Args:
            step: The step, counted from 0.
            pack: Its pack with the worst loss; None if only the gradient is wrong.
            what: "loss" or "gradient".
            how: What is wrong with it: "is not finite (NaN or infinite)".
            is_spike: Whether the loss is finite, and only far above those before it.
        """
        super().__init__(f"the {what} of step {step + 1:,} {how}")
        self.step, self.pack, self.is_spike = step, pack, is_spike


def spike_limit(recent_losses: Sequence[float], *, deviations: float) -> float:
    """The loss above which a step is a spike; infinite while too few have been seen.

    The median of the last 64 losses plus `deviations` standard deviations, these too estimated by a
    median, so that an earlier spike does not hide the next one.

    Args:
        recent_losses: Of the last steps, in nats.
        deviations: How far is too far.
    """
    if len(recent_losses) < SPIKE_HISTORY:
        return math.inf
    middle = statistics.median(recent_losses)
    spread = statistics.median(abs(loss - middle) for loss in recent_losses) * DEVIATION_OF_MEDIAN
    return middle + deviations * max(spread, SMALLEST_SPREAD * middle)


def with_loss(recent_losses: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """The window moved on by a step."""
    return (*recent_losses, loss)[-SPIKE_WINDOW:]


def is_too_many(skipped: Sequence[int], *, patience: int) -> bool:
    """Whether more steps went wrong lately than a run may pass over.

    Args:
        skipped: Steps passed over, ascending, the newest last.
        patience: How many of the last `BAD_STEP_WINDOW` may be.
    """
    return sum(step > skipped[-1] - BAD_STEP_WINDOW for step in skipped) > patience
