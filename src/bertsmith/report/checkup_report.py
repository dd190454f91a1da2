"""A checkup as a person reads it: a table on a terminal, plain lines elsewhere; or as JSON."""

import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from bertsmith.data.checkup.findings import Finding
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.tables import describe_labels
from bertsmith.data.checkup.whole import Checkup
from bertsmith.report.console import table_console

COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}
PLACES_SHOWN = 3


def print_checkup(checkup: Checkup, *, is_json: bool) -> None:
    """Print to standard output."""
    if is_json:
        print(json.dumps(checkup.as_json(), ensure_ascii=False).encode("utf-8", "replace").decode())
        return
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for line in facts_of(checkup):
        console.print(line, markup=False)
    if not console.is_terminal:
        for finding in checkup.findings:
            console.print(line_of(finding), markup=False)
    elif checkup.findings:
        table_console().print(_grid(checkup))
    console.print(verdict_of(checkup), markup=False)


def facts_of(checkup: Checkup) -> list[str]:
    """What the data is, a line each."""
    lines = _facts(checkup.train)
    if checkup.dev is not None:
        lines += _facts(checkup.dev)
    if checkup.train.lengths is not None and checkup.train.lengths.unit == "words":
        lines.append(
            "lengths are in words; name a model with --tokenizer to have them in its tokens"
        )
    return lines


def line_of(finding: Finding) -> str:
    """A finding as a line of text."""
    first = f"; first at {', '.join(_short_places(finding))}" if finding.places else ""
    what = f"{_count(finding)} {finding.what}".strip()
    return f"{finding.severity}: {finding.check}: {what}{first}. {finding.advice}"


def verdict_of(checkup: Checkup) -> str:
    """The last line."""
    counts = ", ".join(
        f"{number:,} {name}{'' if number == 1 else 's'}"
        for name in COLORS
        if (number := checkup.count(name))
    )
    if not counts:
        return "nothing found"
    return counts + ("" if checkup.is_fit else ": training on it as it is would be wrong")


def _facts(part: Part) -> list[str]:
    columns = ", ".join(f"{role} {name!r}" for role, name in part.columns.items())
    lines = [f"{part.name}: {part.count:,} {part.unit}" + (f"; {columns}" if columns else "")]
    if part.lengths is not None:
        lines.append(f"  {part.lengths.describe()}")
    if (labels := describe_labels(part)) is not None:
        lines.append(f"  {labels}")
    return lines


def _short_places(finding: Finding) -> list[str]:
    """The first places; the name of a file that has just been named is left out."""
    shown: list[str] = []
    before = ""
    for place in finding.places[:PLACES_SHOWN]:
        file = place.partition(":")[0]
        shown.append(place.removeprefix(file).removeprefix(": ") if file == before else place)
        before = file
    return shown


def _count(finding: Finding) -> str:
    """Such as "3 of 40 (7.50%)"; nothing where there is one thing only, as a file."""
    if finding.total <= 1:
        return ""
    return f"{finding.count:,} of {finding.total:,} ({finding.share:.2%})"


def _grid(checkup: Checkup) -> Grid:
    grid = Grid("", "found", "count", "first at", "advice")
    for finding in checkup.findings:
        color = COLORS[finding.severity]
        grid.add_row(
            f"[{color}]{finding.severity}[/]",
            escape(finding.what),
            _count(finding),
            escape("\n".join(_short_places(finding))),
            escape(finding.advice),
        )
    return grid
