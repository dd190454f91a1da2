"""A tag a word: token classification.

It is no `TaskKind`: those score a table's rows, and here a row has as many answers as words.

Shape legend: W words of all sentences end to end, C tags, S1 sentences + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.metrics.spans import SentenceCounts, Span, count_sentence, spans_of
from bertsmith.tasks.config import MONITORS, TaskName

SPAN_METRICS = ("span_f1", "span_macro_f1", "span_precision", "span_recall")
"""Metrics that plain tags have not."""


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """The kind, and whether its tags are those of spans."""

    name: ClassVar[TaskName] = "tokens"
    holdout_said: ClassVar[str] = "by a hash of each sentence"

    has_spans: bool

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics that a line of progress shows."""
        if self.has_spans:
            return ("span_f1", "span_precision", "span_recall", "loss")
        return ("accuracy", "macro_f1", "loss")

    @property
    def monitors(self) -> tuple[str, ...]:
        """Metrics that can pick the best weights."""
        left_out = ("macro_f1",) if self.has_spans else SPAN_METRICS
        return tuple(name for name in MONITORS[self.name] if name not in left_out)

    @property
    def monitor(self) -> str:
        """The metric that picks the best weights if nothing is said."""
        return self.monitors[0]

    def describe(self, names: Sequence[str]) -> str:
        """What a model of this kind is, in a few words for its card."""
        if self.has_spans:
            return f"tagger of spans of {len(names) // 2} types"
        return f"tagger with {len(names)} tags"

    def count(
        self, logits_WC: Tensor, tags_W: Tensor, words_S1: Tensor, names: Sequence[str]
    ) -> list[SentenceCounts]:
        """What each sentence adds to the scores.

        Raises:
            FloatingPointError: A score of the model is not finite.
        """
        if not bool(torch.isfinite(logits_WC).all()):
            raise FloatingPointError("the model gives scores that are not finite (NaN or infinity)")
        nats_W = F.cross_entropy(logits_WC.double(), tags_W, reduction="none").tolist()
        said = [names[i] for i in logits_WC.argmax(1).tolist()]
        true = [names[i] for i in tags_W.tolist()]
        bounds = words_S1.tolist()
        return [
            count_sentence(said[a:b], true[a:b], nats=sum(nats_W[a:b]), has_spans=self.has_spans)
            for a, b in pairwise(bounds)
        ]


@dataclass(frozen=True, kw_only=True)
class Entity:
    """A span that a model found."""

    span: Span
    """In words."""

    score: float
    """Mean over its words of the probability of their tags."""


def entities_of(tags: Sequence[str], chances: Sequence[float]) -> list[Entity]:
    """The spans of a sentence's tags in IOB2.

    Args:
        tags: As the model gives them.
        chances: Probability of each.
    """
    return [
        Entity(
            span=span,
            score=sum(chances[span.first : span.end]) / (span.end - span.first),
        )
        for span in spans_of(tags)
    ]
