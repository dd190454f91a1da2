"""What training has predicted, for people and for programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.data.coverage import Coverage
from bertsmith.report.scatter import write_scatter

LEAST_TRAINED = 50
"""Token types that a report names."""

PLOT_FILE = "coverage.svg"


def coverage_json(coverage: Coverage, name_of: Callable[[int], str]) -> dict[str, Any]:
    """The report as JSON has it, the least trained types by name."""
    return coverage.as_json() | {
        "least_trained": [
            {
                "token": name_of(token),
                "occurrences": int(coverage.occurrences_V[token]),
                "predicted": int(coverage.predicted_V[token]),
            }
            for token in coverage.least_trained(LEAST_TRAINED)
        ]
    }


def coverage_markdown(report: dict[str, Any]) -> str:
    """The report in words and tables.

    Args:
        report: As `coverage_json` gives it.
    """
    lines = [
        f"After {report['epochs']:g} epochs, of {report['sample_tokens']:,} positions "
        f"({report['sample_share']:.1%} of the text) each was predicted {report['min_count']:,} to "
        f"{report['max_count']:,} times; {report['never_predicted_share']:.2%} never were. Of "
        f"{report['types']:,} token types {report['types_never_predicted']:,} never were.",
    ]
    if report["is_estimate"]:
        lines += ["", "Independent masks of tokens are drawn by pack: these are like them."]
    lines += [
        "",
        "| token types | types | ... never predicted | tokens | predictions of each | ... none |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in report["by_frequency"].items():
        lines.append(
            f"| {name} | {row['types']:,} | {row['types_never_predicted']:,} | {row['tokens']:,} | "
            f"{row['predictions_per_token']:.2f} | {row['never_predicted_share']:.2%} |"
        )
    named = ", ".join(
        f"`{least['token']}` {least['predicted']:,} of {least['occurrences']:,}"
        for least in report["least_trained"]
    )
    lines += [
        "",
        "Least trained, with times predicted and occurrences: " + named.replace("|", "¦"),
    ]
    return "\n".join(lines)


def write_coverage_plot(file: Path, coverage: Coverage) -> None:
    """Each type by how often it occurs and how often it was predicted, on logarithmic axes."""
    ids = np.flatnonzero(coverage.occurrences_V)
    write_scatter(
        file,
        coverage.occurrences_V[ids].tolist(),
        coverage.predicted_V[ids].tolist(),
        x_name="occurrences of a token type",
        y_name="times predicted",
    )
