"""What `plan` is told: all of the run that is planned, and a little more."""

import math
from dataclasses import dataclass

from bertsmith.recipes.config.finetune import FinetuneConfig
from bertsmith.recipes.config.pretrain import PretrainConfig
from bertsmith.recipes.config.values import check_at_least_one


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan is told besides the run that it is of."""

    output: str = ""
    """Not used: a run's own file may be given as --config."""

    device: str = "this"
    """A device by name (h200, h100, a100-80, l4, t4, rtx-4090, ...), an amount of memory (16GiB),
    or this: the GPU of this machine if there is one, else its CPU."""

    flop_per_second: float | None = None
    """What the device computes in training; None: measured here on a CPU, and for a GPU a share of
    its published rate."""

    price_per_hour: float | None = None
    """Of one device, in any currency; gives the cost of the run."""

    json: bool = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        rate, price = self.flop_per_second, self.price_per_hour
        if rate is not None and not 0.0 < rate < math.inf:
            raise ValueError(f"flop_per_second is {rate}; it must be over 0")
        if price is not None and not 0.0 <= price < math.inf:
            raise ValueError(f"price_per_hour is {price}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class PlanPretrainConfig(PlanOptions, PretrainConfig):
    """Say what memory and time a run will need, before either is spent."""

    data: str = ""
    """Folder that `bertsmith prepare` wrote; it is asked for its vocabulary and its tokens. None
    given: the preset's vocabulary."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        PretrainConfig.__post_init__(self)
        PlanOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class PlanFinetuneConfig(PlanOptions, FinetuneConfig):
    """Say what memory and time a fine-tuning will need, before either is spent."""

    data: str = ""
    """Not read: --examples says how many there are."""

    examples: int | None = None
    """Examples of the table; None: not known, and the time of the whole run is not said."""

    labels: int = 2
    """Classes."""

    table_rows: int | None = None
    """Different tokens in the texts, whose rows of the token table are trained; None: at most all
    of them."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        FinetuneConfig.__post_init__(self)
        check_at_least_one(self, "examples", "labels", "table_rows")
        PlanOptions.__post_init__(self)
