"""`bertsmith evaluate`: score a fine-tuned classifier on a labelled table."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from bertsmith.data.examples import evaluation_batches
from bertsmith.data.labels import label_ids
from bertsmith.data.tables import read_table
from bertsmith.metrics import ClassificationMetrics, ClassificationTally
from bertsmith.recipes.classifier import ahead, open_classifier
from bertsmith.recipes.config import EvaluateConfig

LABELS_IN_GRID = 12
"""A confusion matrix of more labels is wider than a terminal: the worst confusions are listed."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` found."""

    model: str
    adapter: str | None
    data: str
    metrics: ClassificationMetrics
    num_cut: int
    """Examples that were longer than the model reads, and lost their end."""

    skipped_rows: int
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
    """Score every row of the table.

    Raises:
        UserError: The model or the table cannot be used.
    """
    classifier = open_classifier(
        config.model,
        adapter=config.adapter,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    table = read_table(
        Path(config.data), config.table, is_pair=classifier.is_pair, usual=classifier.usual
    )
    known_from = f"the adapter {config.adapter}" if config.adapter else f"the model {config.model}"
    labels_N = label_ids(table, classifier.labels, known_from=known_from)
    started_at_seconds = time.perf_counter()
    examples = classifier.tokenizer.encode(table.texts, table.pairs)
    tally = ClassificationTally(len(classifier.labels))
    batches = evaluation_batches(examples, labels_N, tokens_per_pack=config.tokens_per_pack)
    for batch in ahead(batches):
        tally.add(classifier.logits_NC(batch.inputs), batch.labels_N)
    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=tally.metrics(classifier.labels),
        num_cut=examples.num_cut,
        skipped_rows=table.skipped_rows,
        seconds=time.perf_counter() - started_at_seconds,
    )


def as_json(evaluation: Evaluation) -> dict[str, object]:
    """The evaluation as it is printed with `--json`."""
    metrics = evaluation.metrics
    return {
        "model": evaluation.model,
        **({} if evaluation.adapter is None else {"adapter": evaluation.adapter}),
        "data": evaluation.data,
        "num_examples": metrics.num_examples,
        "metrics": metrics.by_name(),
        "labels": [asdict(score) for score in metrics.labels],
        "confusion": metrics.confusion,
        "num_cut": evaluation.num_cut,
        "skipped_rows": evaluation.skipped_rows,
        "seconds": round(evaluation.seconds, 3),
    }


def print_tables(evaluation: Evaluation, console: Console) -> None:
    """Overall scores, scores of each label, and what is taken for what."""
    metrics = evaluation.metrics
    console.print(f"{evaluation.data}: {metrics.num_examples:,} examples", markup=False)
    overall = Grid("metric", "value")
    for name, value in metrics.by_name().items():
        overall.add_row(name, f"{value:.4f}")
    console.print(overall)
    by_label = Grid("label", title="each label")
    for heading in ("precision", "recall", "f1", "support"):
        by_label.add_column(heading, justify="right")
    for score in metrics.labels:
        numbers = (f"{v:.3f}" for v in (score.precision, score.recall, score.f1))
        by_label.add_row(escape(score.label), *numbers, f"{score.support:,}")
    console.print(by_label)
    console.print(_confusions(metrics))
    if evaluation.num_cut:
        console.print(f"{evaluation.num_cut:,} examples were too long and lost their end")
    if evaluation.skipped_rows:
        console.print(f"{evaluation.skipped_rows:,} rows could not be used and were skipped")


def _confusions(metrics: ClassificationMetrics) -> Grid:
    names = [escape(score.label) for score in metrics.labels]
    if len(names) <= LABELS_IN_GRID:
        grid = Grid("true \\ predicted", title="confusion matrix")
        for name in names:
            grid.add_column(name, justify="right")
        for name, row in zip(names, metrics.confusion, strict=True):
            grid.add_row(name, *(f"{count:,}" for count in row))
        return grid
    wrong = [
        (count, names[i], names[j])
        for i, row in enumerate(metrics.confusion)
        for j, count in enumerate(row)
        if i != j and count
    ]
    grid = Grid("true", "predicted", title="most frequent confusions (all with --json)")
    grid.add_column("examples", justify="right")
    for count, true, predicted in sorted(wrong, key=lambda w: (-w[0], w[1:]))[:LABELS_IN_GRID]:
        grid.add_row(true, predicted, f"{count:,}")
    return grid
