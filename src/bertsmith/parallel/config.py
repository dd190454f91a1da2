"""How many devices train, and how. Imports neither torch nor numpy."""

import math
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["auto", "none", "dp", "ddp", "fsdp"]

BYTES_A_PARAMETER = 16
"""fp32 weight, gradient and two moments."""

SHARE_FOR_PARAMETERS = 0.5
"""Of a GPU's memory; where they need more, auto shards the model. Activations take the rest."""


def is_worth_sharding(num_parameters: int, *, memory_bytes: int) -> bool:
    """Whether auto shards a model over GPUs of so much memory each."""
    return num_parameters * BYTES_A_PARAMETER > SHARE_FOR_PARAMETERS * memory_bytes


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Several devices for one run; the result does not depend on how many."""

    strategy: StrategyName = "auto"
    """none: one device. dp: one process feeds several GPUs (torch.nn.DataParallel). ddp: a process
    a device, each with the whole model. fsdp: a process a device, the model in shards. auto: none
    for one device, else ddp, or fsdp where the model would not fit."""

    devices: int | Literal["auto"] = 1
    """Devices of this machine: GPUs, or processes on the CPU; auto: every GPU, or 1 on the CPU.
    Under torchrun or srun their number is given and this is left alone."""

    timeout_seconds: float = 600.0
    """A rank that does not come to a step for so long ends the run, and is named."""

    join_seconds: float = 300.0
    """How long ranks wait for each other at the start."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if self.devices != "auto" and self.devices < 1:
            raise ValueError(f"devices is {self.devices}; it must be at least 1, or auto")
        for name in ("timeout_seconds", "join_seconds"):
            if not 1.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
