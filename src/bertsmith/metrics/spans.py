"""How well spans are found and tags are told apart, over a whole set of sentences.

A span counts if its type and both its ends are right, as in conlleval and in `seqeval`'s default
mode: where a tag goes on with nothing, it begins a span.

Shape legend: W words of all sentences end to end, S sentences, S1 = S + 1.

Source:
    Tjong Kim Sang and De Meulder 2003 (CoNLL-2003, conlleval).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bertsmith.metrics.score_table import ScoreTable


class Span(NamedTuple):
    """Words in a row that together are something."""

    first: int
    end: int
    """One more than the last word."""

    kind: str


class Score(NamedTuple):
    """Of one type, or of all; shares that nothing defines are 0, as everybody counts."""

    precision: float
    recall: float
    f1: float
    support: int
    """Of the truth."""


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans of one sentence in IOB2; an I that goes on with nothing begins one."""
    found: list[Span] = []
    first, kind_before = 0, ""
    for i, tag in enumerate([*tags, "O"]):
        position, _, kind = tag.partition("-")
        goes_on = position == "I" and kind == kind_before
        if kind_before and not goes_on:
            found.append(Span(first, i, kind_before))
        if not goes_on:
            first, kind_before = i, kind
    return found


def score(num_right: int, num_said: int, num_true: int) -> Score:
    """Precision, recall and F1 from counts."""
    precision = num_right / num_said if num_said else 0.0
    recall = num_right / num_true if num_true else 0.0
    both = precision + recall
    return Score(precision, recall, 2 * precision * recall / both if both else 0.0, num_true)


@dataclass(frozen=True, kw_only=True)
class SentenceCounts:
    """What one sentence adds to the scores; sums of these are all that scores are made of."""

    right: Counter[str]
    """Spans, or tags where there are no spans, by type: said and true."""

    said: Counter[str]
    true: Counter[str]
    words: int
    right_words: int
    nats: float
    """Cross-entropy of its words, summed."""


def count_sentence(
    said: Sequence[str], true: Sequence[str], *, nats: float, has_spans: bool
) -> SentenceCounts:
    """Count one sentence.

    Args:
        said: The model's tags, in IOB2 or plain.
        true: The true ones, as many.
        nats: Its summed loss.
        has_spans: Whether tags are those of spans.
    """
    if has_spans:
        said_spans, true_spans = spans_of(said), spans_of(true)
        both = set(said_spans) & set(true_spans)
        right = Counter(span.kind for span in both)
        said_kinds = Counter(span.kind for span in said_spans)
        true_kinds = Counter(span.kind for span in true_spans)
    else:
        right = Counter(tag for tag, other in zip(said, true, strict=True) if tag == other)
        said_kinds, true_kinds = Counter(said), Counter(true)
    return SentenceCounts(
        right=right,
        said=said_kinds,
        true=true_kinds,
        words=len(true),
        right_words=sum(a == b for a, b in zip(said, true, strict=True)),
        nats=nats,
    )


@dataclass(frozen=True, kw_only=True)
class TagMetrics:
    """Scores over a whole set."""

    num_examples: int
    """Sentences."""

    num_words: int
    has_spans: bool
    overall: Score
    """Over all spans together (micro); of plain tags over all words."""

    macro_f1: float
    """Mean of F1 over the types, or tags, that are true or said somewhere."""

    by_kind: Mapping[str, Score]
    accuracy: float
    """Share of words whose tag is right."""

    loss: float
    """Nats a word."""

    def by_name(self) -> dict[str, float]:
        """The scores by their names."""
        of_spans = {
            "span_f1": self.overall.f1,
            "span_precision": self.overall.precision,
            "span_recall": self.overall.recall,
            "span_macro_f1": self.macro_f1,
        }
        of_words = {"accuracy": self.accuracy, "loss": self.loss}
        if self.has_spans:
            return of_spans | of_words
        return {"accuracy": self.accuracy, "macro_f1": self.macro_f1, "loss": self.loss}

    def details(self) -> Mapping[str, object]:
        """Every type's scores."""
        return {
            "num_words": self.num_words,
            "types": {kind: one._asdict() for kind, one in self.by_kind.items()},
        }

    def tables(self) -> Sequence[ScoreTable]:
        """Every type's scores."""
        return [
            ScoreTable(
                title="spans by type" if self.has_spans else "words by tag",
                headings=("type" if self.has_spans else "tag", "precision", "recall", "F1", "true"),
                rows=[
                    (kind, *(f"{value:.4f}" for value in one[:3]), f"{one.support:,}")
                    for kind, one in self.by_kind.items()
                ],
            )
        ]


def tag_metrics(sentences: Sequence[SentenceCounts], *, has_spans: bool) -> TagMetrics:
    """Scores of some sentences, at least one with a word."""
    right, said, true = Counter[str](), Counter[str](), Counter[str]()
    for one in sentences:
        right += one.right
        said += one.said
        true += one.true
    num_words = sum(one.words for one in sentences)
    assert num_words, "metrics of no word"
    by_kind = {
        kind: score(right[kind], said[kind], true[kind]) for kind in sorted(set(said) | set(true))
    }
    return TagMetrics(
        num_examples=len(sentences),
        num_words=num_words,
        has_spans=has_spans,
        overall=score(right.total(), said.total(), true.total()),
        macro_f1=sum(one.f1 for one in by_kind.values()) / len(by_kind) if by_kind else 0.0,
        by_kind=by_kind,
        accuracy=sum(one.right_words for one in sentences) / num_words,
        loss=sum(one.nats for one in sentences) / num_words,
    )
