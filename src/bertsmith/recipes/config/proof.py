"""What the verbs are told that show what works on this machine: `demo` and `selftest`."""

from dataclasses import dataclass, field
from typing import Literal

from bertsmith.parallel.config import ParallelConfig
from bertsmith.recipes.config.values import Device, check_at_least_one


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Run the whole path on the docstrings of the installed Python packages; no download."""

    output: str = "demo"
    """Folder to write."""

    minutes: float = 8.0
    """Time for the whole demo, about."""

    seeds: int = 3
    """Fine-tuning runs on each side of the comparison."""

    overwrite: bool = False
    """Replace what another demo left in `output`."""


@dataclass(frozen=True, kw_only=True)
class SelftestConfig:
    """Prove on this machine that several devices give one device's result."""

    what: Literal["parallel"] = "parallel"
    """What to prove."""

    steps: int = 20
    """Optimizer steps of each small training."""

    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(devices="auto"))

    device: Device = "auto"
    """auto: the GPUs if there are any."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        check_at_least_one(self, "steps")
