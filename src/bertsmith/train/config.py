"""How a model is trained: budget, optimizer, schedule, saving. Imports neither torch nor numpy."""

import math
from dataclasses import dataclass
from typing import Literal

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

    def __post_init__(self) -> None:
        """Reject values out of range."""
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


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints: when, and how many are kept."""

    every_steps: int | None = None
    """Save each time so many steps are done; None: only at the end, and on Ctrl-C."""

    every_minutes: float | None = 10.0
    """Save when so many minutes have passed since the last one."""

    keep_last: int = 2
    """Newest checkpoints that are kept; one made at the best step stays besides."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        _at_least_one(every_steps=self.every_steps, keep_last=self.keep_last)
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"every_minutes is {self.every_minutes}; it must be > 0, or null")


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
