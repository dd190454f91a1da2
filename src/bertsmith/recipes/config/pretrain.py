"""What `pretrain` and `coverage` are told."""

import math
from dataclasses import dataclass, field
from typing import get_args

from bertsmith.data.config import (
    SHORTEST_PAIR,
    MaskingConfig,
    Objective,
    PackingConfig,
    has_pairs,
)
from bertsmith.recipes.config.training import TrainingConfig
from bertsmith.recipes.config.values import check_at_least_one
from bertsmith.train.config import EvalConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """Train an encoder on prepared text by masked-language modelling."""

    data: str
    """Folder that `bertsmith prepare` wrote."""

    model: str
    """A preset (bert-tiny, bert-mini, bert-small, bert-medium, bert-base, bert-large), a
    config.json, a checkpoint folder or a Hugging Face hub name."""

    steps: int | None = None
    """Budget in optimizer steps. Give one of steps, tokens, epochs, minutes."""

    tokens: int | None = None
    """Budget in real tokens."""

    epochs: float | None = None
    """Budget in passes over the data."""

    minutes: float | None = None
    """Budget in minutes of training; the schedule fits the time that is left."""

    tokens_per_step: int = 8192
    """Real tokens behind one optimizer step: whole packs, as many as fit."""

    objective: Objective = "mlm"
    """What is learned. mlm: to name hidden tokens. mlm+nsp: also whether a second segment comes
    next in the text or is of another document (BERT). mlm+sop: also whether two segments stand in
    order or swapped (ALBERT)."""

    packing: PackingConfig = field(default_factory=PackingConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        super().__post_init__()
        check_at_least_one(self, "tokens_per_step")
        if self.tokens_per_step < self.packing.tokens_per_pack:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is below packing.tokens_per_pack "
                f"{self.packing.tokens_per_pack}; a step has at least one pack, so lower that too"
            )
        _check_objective(self.objective, self.packing)


@dataclass(frozen=True, kw_only=True)
class CoverageConfig:
    """Say which positions and tokens a masking will have predicted, without training."""

    data: str
    """Folder that `bertsmith prepare` wrote."""

    epochs: float
    """Passes over the data."""

    objective: Objective = "mlm"
    """As in pretraining: pairs of segments leave one token fewer for text in a sequence."""

    packing: PackingConfig = field(default_factory=PackingConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)

    tokens_per_step: int = 8192
    """As in pretraining; matters where the last epoch is not whole."""

    seed: int = 0
    """As in pretraining."""

    sample_tokens: int = 1 << 22
    """About the most tokens to count; of a larger text, those of documents from all over it."""

    plot: str | None = None
    """SVG file to draw the types' predictions over their occurrences in."""

    json: bool = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        check_at_least_one(self, "tokens_per_step", "sample_tokens")
        _check_objective(self.objective, self.packing)
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; it must be over 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")


def _check_objective(objective: Objective, packing: PackingConfig) -> None:
    """Reject what is none, and sequences too short for two segments."""
    if objective not in get_args(Objective):
        raise ValueError(
            f"objective is {objective!r}; it must be one of {', '.join(get_args(Objective))}"
        )
    if has_pairs(objective) and packing.max_sequence_tokens < SHORTEST_PAIR:
        raise ValueError(
            f"objective {objective} needs packing.max_sequence_tokens of at least {SHORTEST_PAIR}, "
            f"for [CLS] x [SEP] x [SEP]; it is {packing.max_sequence_tokens}"
        )
