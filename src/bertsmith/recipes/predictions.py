"""The file that `bertsmith predict` writes: the table's own columns, then what was predicted.

CSV gets the columns `prediction` and `probability_<label>`; JSONL the keys `prediction`
and `probabilities`. Of several models each has its own: `prediction_<name>` and
`probability_<name>_<label>`, or `probabilities_<name>`. A file appears whole under its name, or
not at all.
"""

import contextlib
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bertsmith.errors import UserError

PREDICTED = "prediction"
PROBABILITY = "probability_"
PROBABILITIES = "probabilities"

FORMULA = re.compile(r"[=+\-@\t\r]")
"""How a cell begins that spreadsheet programs run (OWASP, CSV injection)."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Answer = tuple[int, Sequence[float]]
"""The id of a row's label, and the probability of each label."""

WriteRow = Callable[[tuple[object, ...], Sequence[Answer]], None]
"""Takes a row's own values, and the answer of each model."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is written of one model's answers."""

    labels: Sequence[str]
    """Their names, in the order of their ids."""

    name: str | None = None
    """Of the model, where there are several."""

    @property
    def prediction(self) -> str:
        """The column, or key, of the label."""
        return PREDICTED if self.name is None else f"{PREDICTED}_{self.name}"

    @property
    def probabilities(self) -> str:
        """The key of all probabilities."""
        return PROBABILITIES if self.name is None else f"{PROBABILITIES}_{self.name}"

    @property
    def columns(self) -> list[str]:
        """All columns, in their order."""
        of = PROBABILITY if self.name is None else f"{PROBABILITY}{self.name}_"
        return [self.prediction, *(of + label for label in self.labels)]


def check_output(path: Path, *, overwrite: bool, source: Path) -> None:
    """Refuse an output that could not be written, before any work is done.

    Raises:
        UserError: It exists, its ending is unknown, or its folder is missing or read-only.
    """
    if str(path) == "-":
        return
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise UserError(f"--output {path}: the ending must be .csv or .jsonl")
    if path.is_dir():
        raise UserError(f"--output {path}: is a folder; name a file")
    if path.exists():
        if source.exists() and path.samefile(source):
            raise UserError(f"--output {path}: is the table itself; name another file")
        if not overwrite:
            raise UserError(f"--output {path}: exists already; name another, or use --overwrite")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--output {path}: no permission to write in {path.parent}")


def check_columns(columns: Sequence[str], predicted: Sequence[Predicted], *, where: str) -> None:
    """Refuse a table that already has a column which would be written."""
    new = {name for one in predicted for name in (*one.columns, one.probabilities)}
    taken = [name for name in columns if name in new]
    if taken:
        raise UserError(f"{where}: a column {taken[0]!r} is there already; rename or remove it")


@contextlib.contextmanager
def prediction_file(
    path: Path, columns: Sequence[str], predicted: Sequence[Predicted], *, escape_formulas: bool
) -> Iterator[WriteRow]:
    """Open the output and give the function that writes a row.

    Args:
        path: .csv or .jsonl; `-` writes CSV to standard output.
        columns: Names of the table's own columns.
        predicted: What each model's answers are written as.
        escape_formulas: Whether CSV text that begins like a formula gets an apostrophe before it.
    """
    if str(path) == "-":
        yield _csv_rows(sys.stdout, columns, predicted, escape_formulas=escape_formulas)
        sys.stdout.flush()
        return
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8", newline="") as file:
            if path.suffix.lower() == ".csv":
                yield _csv_rows(file, columns, predicted, escape_formulas=escape_formulas)
            else:
                yield _json_rows(file, columns, predicted)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
    finally:
        fresh.unlink(missing_ok=True)


def _csv_rows(
    file: TextIO, columns: Sequence[str], predicted: Sequence[Predicted], *, escape_formulas: bool
) -> WriteRow:
    writer = csv.writer(file, lineterminator="\n")
    cell = _safe_cell if escape_formulas else _cell
    names = [[cell(label) for label in one.labels] for one in predicted]
    new = [name for one in predicted for name in one.columns]
    writer.writerow([cell(name) for name in (*columns, *new)])

    def write(values: tuple[object, ...], answers: Sequence[Answer]) -> None:
        cells = [cell(value) for value in values]
        for labels, (label, probabilities) in zip(names, answers, strict=True):
            cells += [labels[label], *(f"{p:.6g}" for p in probabilities)]
        writer.writerow(cells)

    return write


def _json_rows(file: TextIO, columns: Sequence[str], predicted: Sequence[Predicted]) -> WriteRow:
    def write(values: tuple[object, ...], answers: Sequence[Answer]) -> None:
        row = dict(zip(columns, values, strict=True))
        for one, (label, probabilities) in zip(predicted, answers, strict=True):
            shares = [float(f"{p:.6g}") for p in probabilities]
            row[one.prediction] = one.labels[label]
            row[one.probabilities] = dict(zip(one.labels, shares, strict=True))
        file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    return write


def _cell(value: object) -> str:
    """A value as CSV text; what is no text or number is JSON."""
    match value:
        case str():
            return value
        case None:
            return ""
        case bool() | list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
        case _:
            return str(value)


def _safe_cell(value: object) -> str:
    text = _cell(value)
    return "'" + text if FORMULA.match(text) and not NUMBER.fullmatch(text) else text
