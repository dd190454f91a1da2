"""What every training is told, of whatever it trains."""

from dataclasses import dataclass, field
from typing import Literal

from bertsmith.checkpoint.config import SaveConfig
from bertsmith.model.checkpointing import parse_checkpointing
from bertsmith.model.parts import HEAD, read_parts
from bertsmith.parallel.config import ParallelConfig
from bertsmith.recipes.config.values import Device, check_at_least_one
from bertsmith.train.config import GuardConfig, OptimConfig, Precision


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The part that pretraining and fine-tuning share."""

    model: str
    """What to begin with."""

    data: str
    """What to train on."""

    output: str
    """Run folder to write."""

    seed: int = 0
    """Everything random follows from it."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    micro_batch: int | Literal["auto"] = "auto"
    """Most tokens in one forward and backward pass: packs are cut between sequences, which changes
    nothing but rounding. auto: whole packs, or a half, a quarter, ... of one: the largest that is
    planned to fit, tried before the first step. Whatever it is, it is halved where it does not fit
    after all."""

    checkpointing: str = "none"
    """What blocks keep for the backward pass: less memory for more time, the same result.
    none: all. selective: half. full: one tensor a block. every:N: each N-th block is as in full.
    budget:X: at most the share X of none, picked by block."""

    freeze: str | None = None
    """Parts that stay as they are, such as embeddings,0-5 (layers count from 0). What lies below
    the lowest trained part keeps nothing for the backward pass."""

    hidden_dropout_prob: float | None = None
    """Overrides the model's dropout on the residual stream."""

    attention_probs_dropout_prob: float | None = None
    """Overrides the model's dropout on attention."""

    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl."""

    resume: bool = False
    """Go on from the newest checkpoint in `output`; start anew where there is none."""

    resume_override: list[str] = field(default_factory=list)
    """--resume.override on the command line: settings that may differ from the run's own, by key;
    `data` and `tokenizer` name changed data."""

    overwrite: bool = False
    """Replace what another run left in `output`."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        parse_checkpointing(self.checkpointing)
        _check_freeze(self.freeze)
        check_at_least_one(self, "log_every_steps")
        if self.micro_batch != "auto" and self.micro_batch < 1:
            raise ValueError(f"micro_batch is {self.micro_batch}; it must be at least 1, or auto")
        if self.resume_override and not self.resume:
            raise ValueError("resume_override is given without resume; give --resume too")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}; it must be in [0, 1)")


def _check_freeze(freeze: str | None) -> None:
    if freeze is None:
        return
    try:
        parts = read_parts(freeze)
    except ValueError as error:
        raise ValueError(f"freeze is {freeze!r}: {error}") from error
    if HEAD in parts:
        raise ValueError(f"freeze is {freeze!r}; the head is always trained")
