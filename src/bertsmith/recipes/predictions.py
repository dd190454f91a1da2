"""The file that `bertsmith predict` writes: the table's own columns, then what was predicted.

CSV gets the columns `prediction` and `probability_<label>`; JSONL the keys `prediction`
and `probabilities`. Several labels of a text are joined by | in CSV and a list in JSONL; numbers
have no probabilities. Of several models each has its own: `prediction_<name>` and
`probability_<name>_<label>`, or `probabilities_<name>`. A file appears whole under its name, or
not at all.
"""

import contextlib
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bertsmith.errors import UserError
from bertsmith.report.csv_cells import csv_cell
from bertsmith.tasks.kind import Answer, Said

PREDICTED = "prediction"
PROBABILITY = "probability_"
PROBABILITIES = "probabilities"

JOINT = "|"
"""Between the labels of one text in CSV."""

WriteRow = Callable[[tuple[object, ...], Sequence[Answer]], None]
"""Takes a row's own values, and what each model says of it."""


@dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """What `predict` did."""

    num_rows: int
    num_cut: int
    """Texts that were longer than the model reads, and lost their end."""

    skipped_rows: int
    seconds: float

    unread_column: str | None = None
    """A second text, beside the one that was read."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is written of one model's answers."""

    labels: Sequence[str]
    """Names of the labels that have probabilities, in the order of their ids."""

    name: str | None = None
    """Of the model, where there are several."""

    @property
    def prediction(self) -> str:
        """The column, or key, of what is said."""
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


def check_output(
    path: Path,
    *,
    overwrite: bool,
    source: Path,
    option: str = "output",
    endings: Sequence[str] = (".csv", ".jsonl"),
) -> None:
    """Refuse an output that could not be written, before any work is done.

    Args:
        path: Where to; `-` is standard output.
        overwrite: Whether it may exist.
        source: The table that is read, which it must not be.
        option: By which the user named it.
        endings: What its name may end in.

    Raises:
        UserError: It exists, its ending is unknown, or its folder is missing or read-only.
    """
    if str(path) == "-":
        return
    if path.suffix.lower() not in endings:
        raise UserError(f"--{option} {path}: the ending must be {' or '.join(endings)}")
    if path.is_dir():
        raise UserError(f"--{option} {path}: is a folder; name a file")
    if path.exists():
        if source.exists() and path.samefile(source):
            raise UserError(f"--{option} {path}: is the table itself; name another file")
        if not overwrite:
            raise UserError(f"--{option} {path}: exists already; name another, or use --overwrite")
    if not path.parent.is_dir():
        raise UserError(f"--{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--{option} {path}: no permission to write in {path.parent}")


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
    with whole_file(path, option="output") as file:
        if path.suffix.lower() == ".csv":
            yield _csv_rows(file, columns, predicted, escape_formulas=escape_formulas)
        else:
            yield _json_rows(file, columns, predicted)


@contextlib.contextmanager
def whole_file(path: Path, *, option: str) -> Iterator[TextIO]:
    """A file to write that appears under its name when all of it is written, or not at all.

    Raises:
        UserError: It cannot be written; `option` named it.
    """
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"--{option} {path}: cannot be written ({error.strerror})") from error
    finally:
        fresh.unlink(missing_ok=True)


def said_in_csv(said: Said, *, joint: str | None) -> object:
    """An answer for a cell: labels joined, or where `joint` is None as a list in JSON."""
    match said:
        case float():
            return f"{said:.6g}"
        case list():
            return list(said) if joint is None else joint.join(said)
        case _:
            return said


def joint_of(labels: Sequence[str]) -> str | None:
    """What joins labels in a cell; None if one of them holds it, or is empty or like a list."""
    return JOINT if not any(JOINT in label or label.startswith("[") for label in labels) else None


def _csv_rows(
    file: TextIO, columns: Sequence[str], predicted: Sequence[Predicted], *, escape_formulas: bool
) -> WriteRow:
    writer = csv.writer(file, lineterminator="\n")
    joints = [joint_of(one.labels) for one in predicted]
    new = [name for one in predicted for name in one.columns]

    def cell(value: object) -> str:
        return csv_cell(value, escape_formulas=escape_formulas)

    writer.writerow([cell(name) for name in (*columns, *new)])

    def write(values: tuple[object, ...], answers: Sequence[Answer]) -> None:
        cells = [cell(value) for value in values]
        for joint, answer in zip(joints, answers, strict=True):
            said = cell(said_in_csv(answer.said, joint=joint))
            cells += [said, *(f"{p:.6g}" for p in answer.chances)]
        writer.writerow(cells)

    return write


def _json_rows(file: TextIO, columns: Sequence[str], predicted: Sequence[Predicted]) -> WriteRow:
    def write(values: tuple[object, ...], answers: Sequence[Answer]) -> None:
        row = dict(zip(columns, values, strict=True))
        for one, answer in zip(predicted, answers, strict=True):
            said = answer.said
            row[one.prediction] = float(f"{said:.6g}") if isinstance(said, float) else said
            if one.labels:
                shares = [float(f"{p:.6g}") for p in answer.chances]
                row[one.probabilities] = dict(zip(one.labels, shares, strict=True))
        file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    return write
