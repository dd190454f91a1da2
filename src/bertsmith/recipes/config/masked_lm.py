"""What the verbs are told that ask a pretrained model: `fill` and `score`."""

from dataclasses import dataclass, field

from bertsmith.recipes.config.values import Device, check_at_least_one
from bertsmith.train.config import Precision


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """What a pretrained model is asked, and how it runs."""

    model: str
    """Folder of a pretrained model, its run folder, or a hub name."""

    texts: list[str] = field(default_factory=list)
    """Texts; the first words of the command line."""

    data: str | None = None
    """File of texts instead, one a line; - reads standard input."""

    json: bool = False
    """Print one JSON object instead of tables."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass."""

    precision: Precision = "fp32"
    """fp32 is exact; bf16 and auto are faster where the hardware has them."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        check_at_least_one(self, "tokens_per_pack")


@dataclass(frozen=True, kw_only=True)
class FillConfig(AskConfig):
    """Name the words that texts hide as [MASK], with their probabilities."""

    texts: list[str] = field(default_factory=list)
    """Texts with [MASK]; the first words of the command line."""

    top_k: int = 5
    """Tokens to name for each [MASK]."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        super().__post_init__()
        check_at_least_one(self, "top_k")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(AskConfig):
    """Say how likely a pretrained model finds sentences (pseudo-perplexity)."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass; a text of n tokens is read n times."""
