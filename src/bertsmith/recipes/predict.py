"""`bertsmith predict`: what a model says of the rows of a file or of standard input."""

import sys

from bertsmith.data.checkup.grammar import number_of
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.forms import form_of_model
from bertsmith.recipes.predictions import PredictSummary


def main(config: PredictConfig) -> int:
    """Predict, and say on standard error what was done."""
    form = form_of_model(config.model, adapter=next(iter(config.adapter), None))
    summary = form.predict(config)
    rate = summary.num_rows / max(summary.seconds, 1e-9)
    done = f"{number_of(summary.num_rows, form.row)} {form.done} in {summary.seconds:.1f} s"
    notes = [f"{done} ({rate:,.0f} a second)"]
    if summary.num_cut:
        notes.append(f"cut at the end, as too long: {summary.num_cut:,}")
    if summary.skipped_rows:
        notes.append(f"rows skipped, as they could not be used: {summary.skipped_rows:,}")
    if summary.unread_column is not None:
        notes.append(
            f"column {summary.unread_column!r} was not read: a row has one vector, of one text; "
            f"for the other's say --table.text_column {summary.unread_column}"
        )
    print("; ".join(notes), file=sys.stderr)
    return 0


def predict(config: PredictConfig) -> PredictSummary:
    """Have the model answer for every row, in the rows' order, and write what it says.

    Raises:
        UserError: The model, the data or the output cannot be used. The output then does not
            exist, or is what it was.
    """
    return form_of_model(config.model, adapter=next(iter(config.adapter), None)).predict(config)
