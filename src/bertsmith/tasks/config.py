"""What a user can say about a task: its kind, its loss, its decisions. Without torch and numpy."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import yaml

TaskName = Literal[
    "auto", "classification", "multilabel", "regression", "tokens", "questions", "embedding"
]

MONITORS: Mapping[str, tuple[str, ...]] = {
    "classification": (
        *("accuracy", "macro_f1", "weighted_f1", "matthews_correlation"),
        *("roc_auc", "average_precision", "loss"),
    ),
    "multilabel": (
        # F1 at a half falls to 0 before it rises: a young model finds no label likely.
        *("average_precision", "roc_auc", "loss"),
        *("macro_f1", "micro_f1", "samples_f1", "weighted_f1", "exact_match"),
    ),
    "regression": ("spearman", "pearson", "mse", "mae", "loss"),
    # Of plain tags, which are not those of spans, auto takes accuracy.
    "tokens": (
        *("span_f1", "span_macro_f1", "span_precision", "span_recall"),
        *("accuracy", "macro_f1", "loss"),
    ),
    "questions": (
        *("f1", "exact_match", "loss"),
        *("has_answer_f1", "has_answer_exact_match", "no_answer_accuracy"),
    ),
    "embedding": (
        *("spearman", "pearson", "mse", "mae"),
        *("mean_reciprocal_rank", "recall_at_1", "recall_at_5", "recall_at_10", "loss"),
    ),
}
"""Metrics that can pick the best weights, by task; the first is what auto takes."""

READ_WHOLLY = ("tokens", "questions", "embedding")
"""Tasks whose heads read all tokens of a text, or nearly, instead of its first one."""

WEIGHTINGS = ("none", "balanced", "effective")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the examples of a task with labels are weighed; docs/finetune.md."""

    class_weights: str | dict[str, float] = "none"
    """none: all alike. balanced: examples / (classes * examples of the class). effective: by the
    effective number of examples (Cui et al. 2019). Or a weight a label, '{rare: 5}'; labels that
    are not named weigh 1. The loss is a weighted mean."""

    effective_beta: float = 0.999
    """Of class_weights effective: how much more examples of a class bring anything new."""

    label_smoothing: float = 0.0
    """Share of a target that is spread over all classes."""

    focal_gamma: float = 0.0
    """Focal loss: a term is multiplied by (1 - p)^gamma, so that what is known counts less."""

    def __post_init__(self) -> None:
        """Reject values out of range; a weight a label becomes JSON text, by which runs compare."""
        if self.class_weights not in WEIGHTINGS:
            given = _read_weights(self.class_weights)
            object.__setattr__(self, "class_weights", json.dumps(given, ensure_ascii=False))
        if not 0.0 <= self.effective_beta < 1.0:
            raise ValueError(f"effective_beta is {self.effective_beta}; it must be in [0, 1)")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)")
        if not 0.0 <= self.focal_gamma <= 10.0:
            raise ValueError(f"focal_gamma is {self.focal_gamma}; it must be from 0 to 10")
        if self.focal_gamma and self.label_smoothing:
            raise ValueError("focal_gamma and label_smoothing pull apart; give one of them")

    @property
    def weight_by_label(self) -> dict[str, float] | None:
        """The weights that were given; None where they follow from the data."""
        if self.class_weights in WEIGHTINGS:
            return None
        return _read_weights(self.class_weights)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for."""
        return (
            self.class_weights == "none" and self.label_smoothing == 0.0 and self.focal_gamma == 0.0
        )


def _read_weights(given: str | dict[str, float]) -> dict[str, float]:
    form = f"class_weights is {given!r}; give {', '.join(WEIGHTINGS)}, or {{label: weight}}"
    content: object = given
    if isinstance(given, str):
        try:
            content = yaml.safe_load(given)
        except yaml.YAMLError:
            raise ValueError(form) from None
    if not isinstance(content, dict) or not content:
        raise ValueError(form)
    weights = {}
    for label, weight in content.items():
        try:  # YAML reads 1e-06 as a text, for it has no point
            number = math.nan if isinstance(weight, bool) else float(weight)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 < number < math.inf:
            raise ValueError(f"class_weights gives {label!r} the weight {weight!r}; it must be > 0")
        weights[str(label)] = number
    return weights


@dataclass(frozen=True, kw_only=True)
class DecideConfig:
    """How scores become answers; found on the examples to judge by, kept with the model."""

    thresholds: Literal["half", "tuned"] = "half"
    """Of several labels a text: a label is there if its probability is over a half, or over what
    gives that label the best F1 on the examples to judge by."""

    calibrate: bool = False
    """Divide scores by the temperature that makes probabilities mean what they say (Guo et al.
    2017)."""

    def __post_init__(self) -> None:
        """Reject what is none."""
        if self.thresholds not in ("half", "tuned"):
            raise ValueError(f"thresholds is {self.thresholds!r}; it must be half or tuned")


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """What an answer may be; of --task questions, kept with the model."""

    max_tokens: int = 30
    """Tokens of the longest answer that is looked for, as in BERT's own script."""

    def __post_init__(self) -> None:
        """Reject what is none."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How texts become vectors, and what these are to be; of --task embedding."""

    pooling: Literal["auto", "mean", "cls"] = "auto"
    """mean: of a text's own tokens. cls: its first token. auto: as the model's folder says, else
    mean."""

    scale: float = 20.0
    """Of pairs without scores: cosines are multiplied by it, one over the temperature."""

    score_range: str | None = None
    """Of scored pairs: the scores that mean a cosine of 0 and of 1, such as 0,5; others are a
    fault. None: 0,1 if all lie there, else the lowest and the highest of the training table."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if self.pooling not in ("auto", "mean", "cls"):
            raise ValueError(f"pooling is {self.pooling!r}; it must be auto, mean or cls")
        if not 0.0 < self.scale <= 1000.0:
            raise ValueError(f"scale is {self.scale}; it must be over 0, at most 1000")
        _ = self.range_of_scores

    @property
    def range_of_scores(self) -> tuple[float, float] | None:
        """The range as numbers."""
        if self.score_range is None:
            return None
        try:
            low, high = map(float, self.score_range.strip("[]() ").split(","))
        except ValueError:
            low = high = 0.0
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"score_range is {self.score_range!r}; give two numbers, such as 0,5")
        return low, high


def known_monitors() -> tuple[str, ...]:
    """Every metric that a run of some task can be judged by."""
    return tuple(dict.fromkeys(name for names in MONITORS.values() for name in names))


def known_tasks() -> tuple[str, ...]:
    """What `--task` takes."""
    return get_args(TaskName)
