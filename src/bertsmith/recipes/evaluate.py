"""`bertsmith evaluate`: score a fine-tuned model on labelled data, and show what was found."""

import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from bertsmith.data.checkup.grammar import number_of
from bertsmith.metrics import ScoreTable
from bertsmith.recipes.config import EvaluateConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.forms import form_of_model
from bertsmith.report.console import table_console


def main(config: EvaluateConfig) -> int:
    """Evaluate, and print tables or one JSON object."""
    evaluation = evaluate(config)
    if config.json:
        print(json.dumps(as_json(evaluation), ensure_ascii=False, allow_nan=False))
    else:
        print_tables(evaluation, table_console())
    return 0


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Score a model on data of the form that it reads.

    Raises:
        UserError: The model or the data cannot be used, or the mistakes cannot be written.
    """
    return form_of_model(config.model, adapter=config.adapter).evaluate(config)


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
        f"{evaluation.data}: {number_of(metrics.num_examples, 'example')}, "
        f"computed in {evaluation.precision}",
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
        console.print()
        console.print(_grid(table))
    if evaluation.num_cut:
        console.print(f"examples cut at the end, as too long: {evaluation.num_cut:,}")
    if evaluation.skipped_rows:
        console.print(f"rows skipped, as they could not be used: {evaluation.skipped_rows:,}")


def _grid(table: ScoreTable) -> Grid:
    # Without lines between columns, eight of them fit into a terminal of 80.
    grid = Grid(
        title=table.title or None,
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, heading in enumerate(table.headings):
        grid.add_column(escape(heading), justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*map(escape, row))
    return grid
