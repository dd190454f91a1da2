"""Sentence embeddings, learned from pairs of texts that belong together or from scored pairs.

What the head gives for scores are embeddings: one of each text, of all first texts before all
second ones. Targets are, of each text, a number that equal texts share, and the row's score.

Shape legend: N rows, S texts, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.examples import Examples, ExampleTokenizer
from bertsmith.data.pair_tables import is_negative_column
from bertsmith.data.scores import as_number, hashed_holdout, read_score
from bertsmith.data.tables import BadRowError, LabelledTable, is_missing
from bertsmith.errors import UserError
from bertsmith.metrics import Metrics
from bertsmith.metrics.embedding import retrieval_metrics
from bertsmith.metrics.regression import regression_metrics
from bertsmith.model.objectives import ProblemType
from bertsmith.model.pair_objectives import Contrastive, CosineError, PairObjective
from bertsmith.tasks.config import DecideConfig, EmbeddingConfig, LossConfig, TaskName
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.kind import Answer, Said, TaskKind, nothing_to_weigh
from bertsmith.tasks.windows import Merge

EmbeddingLabel = float | str | None
"""A score, a hard negative, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Embedding(TaskKind[EmbeddingLabel]):
    """Targets are text numbers and scores, float64, shape S x 2."""

    name: ClassVar[TaskName] = "embedding"
    problem_type: ClassVar[ProblemType] = "sentence_embedding"
    holdout_said: ClassVar[str] = "by a hash of each pair"
    has_chances: ClassVar[bool] = False
    is_apart: ClassVar[bool] = True

    texts_per_row: int
    """2, or 3 with a hard negative."""

    score_range: tuple[float, float] | None
    """What becomes 0 and 1; None where rows have no scores."""

    is_range_given: bool = False
    """Whether a score outside of it is a fault."""

    scale: float = 20.0
    """Of cosines in the contrastive loss."""

    @property
    def headline(self) -> tuple[str, ...]:  # type: ignore[override]
        """As the metrics call them."""
        return (*self.monitors[:2], "loss")

    @property
    def monitors(self) -> tuple[str, ...]:
        """Of scored pairs correlations, of others ranks."""
        if self.score_range is not None:
            return ("spearman", "pearson", "mse", "mae", "loss")
        return (
            *("mean_reciprocal_rank", "recall_at_1", "recall_at_5", "recall_at_10"),
            "loss",
        )

    def read(
        self, cells: LabelledTable[object], config: TableConfig
    ) -> LabelledTable[EmbeddingLabel]:
        """A score, a hard negative or nothing a row.

        Raises:
            UserError: The column is missing, or a row cannot be used.
        """
        is_scored = self.score_range is not None
        if (is_scored or self.texts_per_row == 3) and cells.columns.label is None:
            raise UserError(
                f"{cells.path}: no column of the {'score' if is_scored else 'negatives'}, as the "
                "table to learn from has; add it, or name it with --table.label_column"
            )
        if is_scored:
            column = cells.columns.label_name
            return cells.read_labels(lambda cell: self._score(cell, column), config)
        if self.texts_per_row == 3:
            column = cells.columns.label_name
            return cells.read_labels(lambda cell: _negative(cell, column), config)
        return replace(cells, labels=(None,) * len(cells))  # type: ignore[return-value]

    def _score(self, cell: object, column: str) -> float:
        if not is_missing(cell) and as_number(cell) is None:
            raise BadRowError(
                f"the score {str(cell)[:40]!r} is no number (column {column!r}); if it is no score "
                "at all, name the right column with --table.label_column"
            )
        score = read_score(cell, column)
        assert self.score_range is not None
        low, high = self.score_range
        if self.is_range_given and not low <= score <= high:
            raise BadRowError(
                f"the score {score:g} is outside of {low:g} to {high:g} (column {column!r}, "
                "--embedding.score_range)"
            )
        return score

    def output_names(self, table: LabelledTable[EmbeddingLabel]) -> tuple[str, ...]:
        """None: an embedding's numbers have no names."""
        if self.score_range is not None and len(set(table.labels)) == 1:
            raise UserError(
                f"{table.path}: every row has the score {table.labels[0]:g}; there is nothing to "
                "learn"
            )
        return ()

    def columns_of_texts(self, table: LabelledTable[EmbeddingLabel]) -> list[Sequence[str]]:
        """First texts, second texts, hard negatives."""
        assert table.pairs is not None, "rows are pairs"
        columns: list[Sequence[str]] = [table.texts, table.pairs]
        if self.texts_per_row == 3:
            columns.append([str(text) for text in table.labels])
        return columns

    def encode(self, table: LabelledTable[EmbeddingLabel], tokenizer: ExampleTokenizer) -> Examples:
        """Every text a sequence of its own, column after column."""
        return tokenizer.encode(
            [text for column in self.columns_of_texts(table) for text in column], None
        )

    def sequences_of(self, rows_N: Tensor, num_rows: int) -> Tensor:
        """Their texts, column after column."""
        return torch.cat([rows_N + num_rows * column for column in range(self.texts_per_row)])

    def targets(
        self, table: LabelledTable[EmbeddingLabel], names: Sequence[str], *, known_from: str
    ) -> Tensor:
        """Numbers of texts in the order of `encode`, and the scores from 0 to 1."""
        numbers: dict[str, int] = {}
        ids = [
            numbers.setdefault(text.strip(), len(numbers))
            for column in self.columns_of_texts(table)
            for text in column
        ]
        scores = [math.nan] * len(table)
        if self.score_range is not None:
            low, high = self.score_range
            scores = [(float(label or 0.0) - low) / (high - low) for label in table.labels]
        return torch.tensor([ids, scores * self.texts_per_row], dtype=torch.float64).T.contiguous()

    def holdout(
        self, table: LabelledTable[EmbeddingLabel], *, share: float, seed: int
    ) -> tuple[list[int], list[int]]:
        """By a hash of the two texts."""
        return hashed_holdout(table, share=share, seed=seed)

    def objective(self, loss: LossConfig, targets: Tensor, names: Sequence[str]) -> PairObjective:
        """Squared error of the cosine, or the contrastive loss."""
        if not loss.is_plain:
            raise nothing_to_weigh(loss, task=self.name)
        if self.score_range is not None:
            return CosineError()
        return Contrastive(scale=self.scale, texts_per_row=self.texts_per_row)

    def check_decide(self, config: DecideConfig) -> None:
        """An embedding decides nothing."""
        if config != DecideConfig():
            raise UserError("--decide: is for tasks with labels, and this is embedding")

    def merged(self, logits_WC: Tensor, owners_W: Tensor, *, merge: Merge) -> Tensor:
        """As they are: each text has one window."""
        return logits_WC

    def decide(self, config: DecideConfig, logits_NC: Tensor, targets: Tensor) -> Decisions:
        """Nothing to decide."""
        return Decisions()

    def metrics(
        self, logits_NC: Tensor, targets: Tensor, names: Sequence[str], decisions: Decisions
    ) -> Metrics:
        """Correlations of the cosine with the scores, or ranks within the table."""
        if not bool(torch.isfinite(logits_NC).all()):
            raise FloatingPointError("the model gives embeddings that are not finite")
        num_rows = len(logits_NC) // self.texts_per_row
        first_ND, second_ND = logits_NC[:num_rows], logits_NC[num_rows : 2 * num_rows]
        if self.score_range is not None:
            cosines_N = (first_ND.double() * second_ND.double()).sum(1)
            return regression_metrics(cosines_N, targets[:num_rows, 1])
        ids_N2 = targets[: 2 * num_rows, 0].view(2, num_rows).T.contiguous()
        return retrieval_metrics(first_ND, second_ND, ids_N2, scale=self.scale)

    def answers(
        self, logits_NC: Tensor, names: Sequence[str], decisions: Decisions
    ) -> list[Answer]:
        """`recipes.texts.embed` writes embeddings as they are."""
        raise AssertionError("an embedding is no answer")

    def truths(self, targets: Tensor, names: Sequence[str]) -> list[Said]:
        """None in the form of answers."""
        raise AssertionError("an embedding is no answer")

    def row_losses(self, logits_NC: Tensor, targets: Tensor, decisions: Decisions) -> Tensor:
        """Of each row, as in training."""
        objective = self.objective(LossConfig(), targets, ())
        return objective.losses_B(logits_NC.double(), targets)

    def describe(self, names: Sequence[str]) -> str:
        """How it was learned."""
        how = "pairs of texts" if self.score_range is None else "scored pairs"
        return f"sentence embedder, learned from {how}"


def embedding_kind(cells: LabelledTable[object], config: EmbeddingConfig) -> tuple[Embedding, str]:
    """The kind that a table's columns show, and why.

    Args:
        cells: The training table, as `data.pair_tables.read_pair_cells` reads it.
        config: Of the user.

    Raises:
        UserError: A range of scores that is none of this table.
    """
    given = config.range_of_scores
    if cells.columns.label is None:
        if given is not None:
            raise UserError(
                f"{cells.path}: has no score, so --embedding.score_range means nothing; name the "
                "column of the score with --table.label_column"
            )
        kind = Embedding(texts_per_row=2, score_range=None, scale=config.scale)
        return kind, (
            "the two texts of a row belong together and those of other rows do not "
            f"(contrastive, scale {config.scale:g})"
        )
    column = cells.columns.label_name
    if is_negative_column(column):
        kind = Embedding(texts_per_row=3, score_range=None, scale=config.scale)
        return kind, f"contrastive, with the hard negatives of column {column!r}"
    if given is not None:
        kind = Embedding(texts_per_row=2, score_range=given, is_range_given=True)
        return kind, f"cosines are to be the scores of column {column!r}, {_said(given)}"
    numbers = [score for cell in cells.labels if (score := _number(cell, column)) is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if (low >= 0.0 and high <= 1.0) or low >= high:
        low, high = 0.0, 1.0
    kind = Embedding(texts_per_row=2, score_range=(low, high))
    why = f"cosines are to be the scores of column {column!r}, {_said((low, high))}"
    return kind, why + " (--embedding.score_range sets others)"


def _said(score_range: tuple[float, float]) -> str:
    return f"whose {score_range[0]:g} becomes 0 and {score_range[1]:g} becomes 1"


def _number(cell: object, column: str) -> float | None:
    try:
        return read_score(cell, column)
    except BadRowError:
        return None


def _negative(cell: object, column: str) -> str:
    if not isinstance(cell, str) or not cell.strip():
        raise BadRowError(f"the text is empty (column {column!r})")
    return cell
