"""`bertsmith evaluate`: score a fine-tuned model on a labelled table."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from torch import Tensor

from bertsmith.data.examples import evaluation_packs
from bertsmith.data.pair_tables import read_pair_cells
from bertsmith.data.tables import LabelledTable, read_cells
from bertsmith.errors import UserError
from bertsmith.metrics import Metrics, ScoreTable
from bertsmith.metrics.bootstrap import intervals
from bertsmith.recipes.classifier import Classifier, ahead, open_classifier
from bertsmith.recipes.config import EvaluateConfig
from bertsmith.recipes.embed import is_embedder, open_embedder
from bertsmith.recipes.mistakes import worst_mistakes, write_mistakes
from bertsmith.recipes.predictions import check_output
from bertsmith.recipes.tagging.evaluate import evaluate_tagger
from bertsmith.recipes.tagging.task import is_tagger
from bertsmith.tasks.config import EmbeddingConfig
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.embedding import embedding_kind


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` found."""

    model: str
    adapter: str | None
    data: str
    metrics: Metrics
    intervals: Mapping[str, tuple[float, float]]
    """From and to of each score at 95 % confidence; empty unless asked for."""

    num_cut: int
    """Examples that were longer than the model reads, and lost their end."""

    skipped_rows: int
    precision: str
    """Of the forward pass: scores near a tie may differ from one to another."""

    seconds: float
    """From the first text tokenised to the last one counted."""


def main(config: EvaluateConfig) -> int:
    """Evaluate, and print tables or one JSON object."""
    evaluation = evaluate(config)
    if config.json:
        print(json.dumps(as_json(evaluation), ensure_ascii=False, allow_nan=False))
    else:
        print_tables(evaluation, Console(file=sys.stdout, highlight=False))
    return 0


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Score every row of the table, or every sentence if the model tags words.

    Raises:
        UserError: The model or the table cannot be used, or the mistakes cannot be written.
    """
    if is_tagger(config.model, adapter=config.adapter):
        return _of_tagger(config)
    if config.errors is not None:
        check_output(
            Path(config.errors),
            overwrite=config.overwrite,
            source=Path(config.data),
            option="errors",
            endings=(".csv",),
        )
    if is_embedder(config.model, adapter=config.adapter):
        return _evaluate_embedder(config)
    classifier = open_classifier(
        config.model,
        adapter=config.adapter,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    kind = classifier.kind
    cells = read_cells(
        Path(config.data), config.table, is_pair=classifier.is_pair, usual=classifier.usual
    )
    table = kind.read(cells, config.table)
    known_from = f"the adapter {config.adapter}" if config.adapter else f"the model {config.model}"
    targets = kind.targets(table, classifier.labels, known_from=known_from)
    started_at_seconds = time.perf_counter()
    logits_NC, num_cut = _logits_NC(classifier, table, tokens_per_pack=config.tokens_per_pack)
    metrics = kind.metrics(logits_NC, targets, classifier.labels, classifier.decisions)
    if config.errors is not None:
        mistakes = worst_mistakes(
            table, logits_NC, targets, classifier=classifier, most=config.errors_rows
        )
        write_mistakes(Path(config.errors), table, mistakes, escape_formulas=config.escape_formulas)

    def scores_of(rows_N: Tensor) -> dict[str, float]:
        return kind.metrics(
            logits_NC[rows_N], targets[rows_N], classifier.labels, classifier.decisions
        ).by_name()

    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=metrics,
        intervals=intervals(
            scores_of, num_rows=len(table), num_samples=config.bootstrap, seed=config.seed
        )
        if config.bootstrap
        else {},
        num_cut=num_cut,
        skipped_rows=table.skipped_rows,
        precision=classifier.compute.name,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _evaluate_embedder(config: EvaluateConfig) -> Evaluation:
    """Score an embedder on pairs, with scores or without.

    Raises:
        UserError: As `evaluate`; mistakes cannot be told of embeddings.
    """
    if config.errors is not None:
        raise UserError("--errors: an embedding is right or wrong by no measure; leave it out")
    embedder = open_embedder(config, adapter=config.adapter)
    usual = None if embedder.task is None else embedder.task.columns
    cells = read_pair_cells(Path(config.data), config.table, usual=usual)
    kind, _ = embedding_kind(cells, EmbeddingConfig())
    table = kind.read(cells, config.table)
    targets = kind.targets(table, (), known_from=config.model)
    started_at_seconds = time.perf_counter()
    examples = kind.encode(table, embedder.tokenizer)
    embeddings_ND = embedder.embed(examples, tokens_per_pack=config.tokens_per_pack)

    def metrics_of(some_N: Tensor) -> Metrics:
        return kind.metrics(embeddings_ND[some_N], targets[some_N], (), Decisions())

    def scores_of(rows_N: Tensor) -> dict[str, float]:
        return metrics_of(kind.sequences_of(rows_N, len(table))).by_name()

    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=metrics_of(torch.arange(len(examples))),
        intervals=intervals(
            scores_of, num_rows=len(table), num_samples=config.bootstrap, seed=config.seed
        )
        if config.bootstrap
        else {},
        num_cut=examples.num_cut,
        skipped_rows=table.skipped_rows,
        precision=embedder.compute.name,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _of_tagger(config: EvaluateConfig) -> Evaluation:
    found = evaluate_tagger(config)
    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=found.metrics,
        intervals=found.intervals,
        num_cut=0,
        skipped_rows=found.skipped_rows,
        precision=found.precision,
        seconds=found.seconds,
    )


def _logits_NC(
    classifier: Classifier, table: LabelledTable[Any], *, tokens_per_pack: int
) -> tuple[Tensor, int]:
    """Scores of every row in the table's order, and how many rows were cut."""
    examples = classifier.tokenizer.encode(table.texts, table.pairs)
    logits_WC = torch.empty(len(examples), len(classifier.labels))
    for rows, batch in ahead(evaluation_packs(examples, tokens_per_pack=tokens_per_pack)):
        logits_WC[torch.tensor(rows)] = classifier.logits_NC(batch)
    return classifier.merged(logits_WC, examples), examples.num_cut


def as_json(evaluation: Evaluation) -> dict[str, object]:
    """The evaluation as it is printed with `--json`."""
    metrics = evaluation.metrics
    return {
        "model": evaluation.model,
        **({} if evaluation.adapter is None else {"adapter": evaluation.adapter}),
        "data": evaluation.data,
        "num_examples": metrics.num_examples,
        "metrics": metrics.by_name(),
        **({"intervals": evaluation.intervals} if evaluation.intervals else {}),
        **metrics.details(),
        "num_cut": evaluation.num_cut,
        "skipped_rows": evaluation.skipped_rows,
        "precision": evaluation.precision,
        "seconds": round(evaluation.seconds, 3),
    }


def print_tables(evaluation: Evaluation, console: Console) -> None:
    """Overall scores, and what else the task's metrics have to show."""
    metrics = evaluation.metrics
    console.print(
        f"{evaluation.data}: {metrics.num_examples:,} examples, computed in {evaluation.precision}",
        markup=False,
    )
    bounds = evaluation.intervals
    headings = ("metric", "value", "from (95 %)", "to") if bounds else ("metric", "value")
    rows = [
        (name, *(f"{number:.4f}" for number in (value, *bounds.get(name, ()))))
        for name, value in metrics.by_name().items()
    ]
    overall = ScoreTable(title="", headings=headings, rows=rows)
    for table in (overall, *metrics.tables()):
        console.print(_grid(table))
    if evaluation.num_cut:
        console.print(f"{evaluation.num_cut:,} examples were too long and lost their end")
    if evaluation.skipped_rows:
        console.print(f"{evaluation.skipped_rows:,} rows could not be used and were skipped")


def _grid(table: ScoreTable) -> Grid:
    grid = Grid(title=table.title or None)
    for number, heading in enumerate(table.headings):
        grid.add_column(escape(heading), justify="right" if number else "left")
    for row in table.rows:
        grid.add_row(*map(escape, row))
    return grid
