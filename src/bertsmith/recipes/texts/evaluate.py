"""`bertsmith evaluate` of a model of texts: of a classifier, or of an embedder."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.data.examples import evaluation_packs
from bertsmith.data.pair_tables import read_pair_cells
from bertsmith.data.tables import LabelledTable, read_cells
from bertsmith.errors import UserError
from bertsmith.metrics import Metrics
from bertsmith.metrics.bootstrap import intervals
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import EvaluateConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.predictions import check_output
from bertsmith.recipes.texts.embed import open_embedder
from bertsmith.recipes.texts.mistakes import worst_mistakes, write_mistakes
from bertsmith.recipes.texts.task import Classifier, open_classifier
from bertsmith.tasks.config import EmbeddingConfig
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.embedding import embedding_kind


def evaluate_classifier(config: EvaluateConfig) -> Evaluation:
    """Score every row of the table.

    Raises:
        UserError: The model or the table cannot be used, or the mistakes cannot be written.
    """
    if config.errors is not None:
        check_output(
            Path(config.errors),
            overwrite=config.overwrite,
            source=Path(config.data),
            option="errors",
            endings=(".csv",),
        )
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


def evaluate_embedder(config: EvaluateConfig) -> Evaluation:
    """Score an embedder on pairs, with scores or without.

    Raises:
        UserError: As `evaluate_classifier`; mistakes cannot be told of embeddings.
    """
    if config.errors is not None:
        raise UserError("--errors: an embedding is right or wrong by no measure; leave it out")
    embedder = open_embedder(
        config.model,
        adapter=config.adapter,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
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


def _logits_NC(
    classifier: Classifier, table: LabelledTable[Any], *, tokens_per_pack: int
) -> tuple[Tensor, int]:
    """Scores of every row in the table's order, and how many rows were cut."""
    examples = classifier.tokenizer.encode(table.texts, table.pairs)
    logits_WC = torch.empty(len(examples), len(classifier.labels))
    for rows, batch in ahead(evaluation_packs(examples, tokens_per_pack=tokens_per_pack)):
        logits_WC[torch.tensor(rows)] = classifier.logits_NC(batch)
    return classifier.merged(logits_WC, examples), examples.num_cut
