"""From scores to answers: a temperature for all, and a threshold for each label.

Both are found on the examples a model is judged by, and stand with it in `bertsmith.json`.

Shape legend: N examples, C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import UserError

HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """How a model's scores are read."""

    temperature: float = 1.0
    """Scores are divided by it before they become probabilities."""

    thresholds_C: tuple[float, ...] | None = None
    """A label is there if its probability is over its threshold; None: a half."""

    def scaled(self, logits_NC: Tensor) -> Tensor:
        """Scores by temperature."""
        return logits_NC if self.temperature == 1.0 else logits_NC / self.temperature

    def is_over(self, chances_NC: Tensor) -> Tensor:
        """Which labels are there, bool, shape N x C."""
        if self.thresholds_C is None:
            return chances_NC > HALF
        return chances_NC > torch.tensor(self.thresholds_C, dtype=chances_NC.dtype)

    def as_json(self, names: Sequence[str]) -> dict[str, object]:
        """What is stored."""
        thresholds = self.thresholds_C
        return {
            "temperature": self.temperature,
            "thresholds": None if thresholds is None else dict(zip(names, thresholds, strict=True)),
        }

    @classmethod
    def from_json(cls, content: object, names: Sequence[str], *, where: str) -> "Decisions":
        """What was stored; that of a model that stored nothing if it is None.

        Raises:
            UserError: It is damaged, or of other labels.
        """
        if content is None:
            return cls()
        try:
            assert isinstance(content, Mapping)
            temperature, stored = float(content["temperature"]), content["thresholds"]
            thresholds = None if stored is None else tuple(float(stored[name]) for name in names)
            assert temperature > 0.0
        except (AssertionError, KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: its decisions do not fit the model's labels; fine-tune again or delete "
                "them"
            ) from None
        return cls(temperature=temperature, thresholds_C=thresholds)


def best_threshold(chances_N: Tensor, is_there_N: Tensor) -> float:
    """The threshold that gives a label the best F1; of equal ones the nearest to a half.

    It lies in the middle between two probabilities that occur. A label that never occurs keeps a
    half.

    Args:
        chances_N: The label's probability in each example.
        is_there_N: Whether it is there, bool.
    """
    num_there = int(is_there_N.sum())
    if num_there == 0:
        return HALF
    ordered_N, order_N = chances_N.double().sort(descending=True)
    found_N = is_there_N[order_N].double().cumsum(0)
    taken_N = torch.arange(1, len(ordered_N) + 1, dtype=torch.float64)
    f1_N = 2 * found_N / (taken_N + num_there)
    below_N = torch.cat([ordered_N[1:], ordered_N.new_zeros(1)])
    cuts_N = (ordered_N + below_N) / 2
    is_cut_N = cuts_N < ordered_N  # equal probabilities are never parted, nor rounded together
    is_over_half_N = chances_N.double() > HALF
    at_half = 2 * float((is_over_half_N & is_there_N).sum())
    at_half /= float(is_over_half_N.sum()) + num_there
    if not bool(is_cut_N.any()):
        return HALF
    best = float(f1_N[is_cut_N].max())
    if at_half >= best:
        return HALF
    good_N = cuts_N[is_cut_N & (f1_N == best)]
    return float(good_N[(good_N - HALF).abs().argmin()])
