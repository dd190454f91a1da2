"""How a model is trained: budget, optimizer, schedule, saving. Imports neither torch nor numpy."""

import math
from dataclasses import dataclass
from typing import Literal

from bertsmith.model.parts import read_rates

Precision = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the learning rate's course."""

    learning_rate: float = 5e-4
    """Peak learning rate."""

    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """After warm-up: linear or cosine decay to 0; wsd (trapezoid) stays at the peak and decays
    linearly over the last `decay_share`."""

    warmup_share: float = 0.06
    """Share of the budget over which the rate rises from 0, unless warmup_steps is given."""

    warmup_steps: int | None = None
    """Steps of warm-up; overrides warmup_share."""

    decay_share: float = 0.2
    """Share of the budget over which wsd decays."""

    weight_decay: float = 0.01
    """Decoupled weight decay; never on biases and norms (decided by module type)."""

    decay_embeddings: bool = True
    """Whether embedding tables decay too."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.98
    """Decay of the second moment."""

    eps: float = 1e-6
    """Added to the root of the second moment."""

    max_grad_norm: float | None = 1.0
    """L2 bound on the whole gradient before the update; None leaves it unclipped."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """Format in which both moments are kept between steps; the update itself is fp32. bf16: half of
    their memory, rounded at random so that averages stay right."""

    layer_decay: float | None = None
    """A lower rate for lower layers: each has so many times the rate of the one above, the head the
    full one and the embeddings the lowest. None: one rate for all."""

    rates: str | None = None
    """Peak rates by part, as in embeddings=5e-5,0-5=3e-5,6-11=1e-5,head=1e-4 (layers count from 0);
    parts that are not named have learning_rate."""

    unfreeze: str | None = None
    """steps:N or epochs:X: the head is trained first, after each so many steps or epochs one more
    layer from the top, the embeddings last. None: all from the start."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        self._check_parts()
        if self.moments not in ("fp32", "bf16"):
            raise ValueError(f"moments is {self.moments!r}; it must be fp32 or bf16")
        for name in ("learning_rate", "weight_decay", "eps"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("warmup_share", "decay_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1]")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must not be negative")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; it must be > 0, or null")

    def _check_parts(self) -> None:
        if self.layer_decay is not None and not 0.0 < self.layer_decay <= 1.0:
            raise ValueError(f"layer_decay is {self.layer_decay}; it must be over 0, at most 1")
        if self.rates is not None:
            if self.layer_decay is not None:
                raise ValueError("rates and layer_decay are both given; give one of them")
            if self.learning_rate == 0.0:
                raise ValueError("rates are given with learning_rate 0, whose course they follow")
            try:
                read_rates(self.rates)
            except ValueError as error:
                raise ValueError(f"rates is {self.rates!r}: {error}") from error
        if self.unfreeze is not None:
            unit, _, number = self.unfreeze.partition(":")
            try:
                count = int(number) if unit == "steps" else float(number)
            except ValueError:
                count = 0
            if unit not in ("steps", "epochs") or not 0 < count < math.inf:
                raise ValueError(
                    f"unfreeze is {self.unfreeze!r}; it must be steps:N or epochs:X, over 0"
                )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What follows when a step's numbers go wrong; all ranks decide alike."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is NaN or infinite. stop: end the run, before the weights are
    touched. skip: pass the step over. rollback: go back to the last checkpoint, and pass that step
    over when it comes again."""

    spike: Literal["off", "report", "skip", "rollback"] = "report"
    """A loss far above those before it. report: say so, train on. skip, rollback: as above."""

    spike_deviations: float = 8.0
    """How far: more than so many standard deviations above the median of the last 64 steps, of
    which at least 32 have to be there. The deviation is estimated by a median as well, and is never
    taken for less than 1 % of the median loss."""

    patience: int = 10
    """Steps that may be passed over within 1,000; one more ends the run."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        _at_least_one(patience=self.patience)
        if not 0.0 < self.spike_deviations < math.inf:
            raise ValueError(f"spike_deviations is {self.spike_deviations}; it must be more than 0")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training."""

    every_steps: int | None = None
    """Evaluate each time so many steps are done; None: ten times a run, and at the end."""

    max_tokens: int = 131_072
    """Validation tokens used in one evaluation: a fixed sample, the same each time."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        _at_least_one(every_steps=self.every_steps, max_tokens=self.max_tokens)


def _at_least_one(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
