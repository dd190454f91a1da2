"""`errors.csv`: the rows that a model gets wrong, worst first, for a person to read."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bertsmith.data.tables import LabelledTable
from bertsmith.recipes.predictions import joint_of, said_in_csv, whole_file
from bertsmith.recipes.texts.task import Classifier
from bertsmith.report.csv_cells import csv_cell


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A row whose answer is not the true one."""

    index: int
    """Of the row among those that were read."""

    truth: object
    """As it is written in a cell."""

    said: object
    loss: float
    """How wrong: nats, of several labels their mean; of numbers the squared error."""


def worst_mistakes(
    table: LabelledTable[Any],
    logits_NC: Tensor,
    targets: Tensor,
    *,
    classifier: Classifier,
    most: int,
) -> list[Mistake]:
    """Rows whose answer is not the true one, by loss; of equal ones the first in the table.

    Args:
        table: The rows.
        logits_NC: The model's scores of them.
        targets: Theirs.
        classifier: The model.
        most: Rows to give.
    """
    kind, names, decisions = classifier.kind, classifier.labels, classifier.decisions
    losses = kind.row_losses(logits_NC, targets, decisions).tolist()
    truths = kind.truths(targets, names)
    answers = kind.answers(logits_NC, names, decisions)
    wrong = [i for i in range(len(table)) if answers[i].said != truths[i]]
    joint = joint_of(names)
    return [
        Mistake(
            index=i,
            truth=said_in_csv(truths[i], joint=joint),
            said=said_in_csv(answers[i].said, joint=joint),
            loss=losses[i],
        )
        for i in sorted(wrong, key=lambda i: (-losses[i], i))[:most]
    ]


def write_mistakes(
    path: Path, table: LabelledTable[Any], mistakes: Sequence[Mistake], *, escape_formulas: bool
) -> None:
    """Write them as CSV: where a row stands, its texts, its label, the answer and the loss.

    Raises:
        UserError: The file cannot be written.
    """
    columns = table.columns
    texts = (
        [columns.text_name] if columns.pair_name is None else [columns.text_name, columns.pair_name]
    )
    with whole_file(path, option="errors") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(*values: object) -> None:
            writer.writerow([csv_cell(v, escape_formulas=escape_formulas) for v in values])

        write("row", "line", *texts, "label", "prediction", "loss")
        for mistake in mistakes:
            i = mistake.index
            pair = () if table.pairs is None else (table.pairs[i],)
            write(
                table.rows[i],
                table.lines[i],
                table.texts[i],
                *pair,
                mistake.truth,
                mistake.said,
                f"{mistake.loss:.6g}",
            )
