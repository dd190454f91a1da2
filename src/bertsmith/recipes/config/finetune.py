"""What `finetune` is told."""

import math
from dataclasses import dataclass, field
from typing import Literal

from bertsmith.data.config import TableConfig
from bertsmith.data.windows import WindowConfig
from bertsmith.model.config import HeadConfig, LoraConfig
from bertsmith.recipes.config.training import TrainingConfig
from bertsmith.recipes.config.values import check_at_least_one
from bertsmith.tasks.config import (
    AnswerConfig,
    DecideConfig,
    EmbeddingConfig,
    LossConfig,
    TaskName,
    known_monitors,
    known_tasks,
)
from bertsmith.train.config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What to try for the best settings; an empty list leaves its option as it is given."""

    trials: int = 0
    """Fine-tunings to try; 0: no search. Needs Optuna, the extra `search`."""

    learning_rate: list[float] = field(default_factory=lambda: [1e-5, 5e-4])
    """From and to of optim.learning_rate, drawn by its logarithm."""

    layer_decay: list[float] = field(default_factory=lambda: [0.7, 1.0])
    """From and to of optim.layer_decay."""

    epochs: list[float] = field(default_factory=lambda: [2.0, 3.0, 5.0])
    """Values of epochs."""

    examples_per_step: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Values of examples_per_step."""

    def __post_init__(self) -> None:
        """Reject ranges that are none, before anything is loaded."""
        if self.trials < 0:
            raise ValueError(f"trials is {self.trials}; it must not be negative")
        for name, most in (("learning_rate", math.inf), ("layer_decay", 1.0)):
            ends: list[float] = getattr(self, name)
            is_range = len(ends) <= 2 and ends == sorted(ends)
            if not is_range or not all(0.0 < end <= most and end < math.inf for end in ends):
                raise ValueError(f"{name} is {ends}; it must be [from, to], over 0, or empty")
        for values, name in (
            (self.epochs, "epochs"),
            (self.examples_per_step, "examples_per_step"),
        ):
            if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; its values must be over 0, each one once")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainingConfig):
    """Train a model of texts, or of pairs of texts, from a checkpoint and a labelled table."""

    model: str
    """Checkpoint folder (bertsmith's or Hugging Face's) or a hub name."""

    data: str
    """Labelled table: CSV, TSV, JSONL or Parquet, also gzip or zstd; tagged sentences; or questions
    on texts, such as SQuAD's JSON."""

    eval: str | None = None
    """Labelled table to judge by; None: a part of `data` is held out, each label in proportion."""

    task: TaskName = "auto"
    """classification: one class a text. multilabel: any number of labels. regression: a number.
    tokens: a tag a word, from CoNLL files or lists of tokens and tags. questions: the answer to a
    question in a text, from SQuAD's JSON or a question a row. embedding: a vector a text, from
    pairs. auto: any but the last, as the form and the labels of `data` show, which is said."""

    holdout_share: float = 0.1
    """Share of `data` held out when no eval table is given."""

    epochs: float = 3.0
    """Passes over the data."""

    steps: int | None = None
    """Budget in optimizer steps; overrides epochs."""

    examples_per_step: int = 32
    """Examples behind one optimizer step."""

    max_sequence_tokens: int | None = None
    """Longest example, special tokens included; longer ones are cut, counted and reported, unless
    `window.overlap_tokens` is given too. None: the model's limit, and longer texts are read in
    windows."""

    tokens_per_pack: int = 4096
    """Most tokens in one pack; a step is as many packs as it needs."""

    monitor: str = "auto"
    """Metric that picks the best checkpoint and stops early. auto: accuracy; of several labels a
    text average_precision; of numbers and scored pairs spearman; of tags of spans span_f1; of
    answers f1; of other pairs mean_reciprocal_rank."""

    patience: int | None = 6
    """Evaluations with neither a better `monitor` nor a lower loss before training stops; None:
    never. At two an epoch six are three epochs."""

    table: TableConfig = field(default_factory=TableConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    decide: DecideConfig = field(default_factory=DecideConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            learning_rate=1e-4, warmup_share=0.1, beta2=0.999, eps=1e-8
        )
    )
    eval_every_steps: int | None = None
    """Steps between evaluations; None: twice an epoch, and at the end."""

    seeds: int = 1
    """Fine-tune with so many seeds, from `seed` on, each in a folder of its own; say mean and
    spread, and keep the best in model/."""

    search: SearchConfig = field(default_factory=SearchConfig)

    keep_models: Literal["best", "all"] = "best"
    """Of `seeds` or `search`: whose weights stay."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        super().__post_init__()
        if self.monitor not in ("auto", *known_monitors()):
            known = ", ".join(known_monitors())
            raise ValueError(f"monitor is {self.monitor!r}; it must be one of auto, {known}")
        if self.task not in known_tasks():
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(known_tasks())}")
        if not 0.0 < self.holdout_share < 1.0:
            raise ValueError(f"holdout_share is {self.holdout_share}; it must be over 0, under 1")
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; it must be over 0")
        check_at_least_one(
            self,
            "steps",
            "examples_per_step",
            "tokens_per_pack",
            "patience",
            "eval_every_steps",
            "seeds",
        )
        if self.seeds > 1 and self.search.trials:
            raise ValueError(f"seeds is {self.seeds} and search.trials is given; give one of them")
        if self.is_several and self.parallel.devices not in (1, "auto"):
            raise ValueError(
                f"devices is {self.parallel.devices}; seeds and search.trials train on one device"
            )
        if self.lora.is_on:
            _check_lora(self)
        if self.task == "embedding":
            _check_embedding(self)
        if self.micro_batch != "auto" and self.head.norm == "batch":
            raise ValueError(
                "micro_batch cannot be set with head.norm batch, whose statistics are those of a "
                "whole pack; set tokens_per_pack"
            )

    @property
    def is_several(self) -> bool:
        """Whether it asks for several runs, of `seeds` or of `search`."""
        return self.seeds > 1 or self.search.trials > 0


def _check_embedding(config: FinetuneConfig) -> None:
    if config.head.norm != "none":
        raise ValueError("head.norm is for tasks with scores, not for task embedding")
    if config.examples_per_step < 2:
        raise ValueError(
            "examples_per_step is 1; with task embedding the negatives of a pair are the others of "
            "its step: give 2 at least, better 32 or more"
        )


def _check_lora(config: FinetuneConfig) -> None:
    if config.freeze is not None:
        raise ValueError(
            f"freeze is {config.freeze!r}, and with lora.rank {config.lora.rank} the whole encoder "
            "is frozen; leave one of them out"
        )
    if config.head.norm != "none":
        raise ValueError(
            f"head.norm is {config.head.norm}, which an adapter's file has no place for; leave it "
            "out, or lora.rank"
        )
    if config.parallel.strategy in ("dp", "fsdp"):
        raise ValueError(
            f"parallel.strategy is {config.parallel.strategy}, and with lora.rank it can be ddp "
            "alone: every device holds the base, and nearly no gradients"
        )
