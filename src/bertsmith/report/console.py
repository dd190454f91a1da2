"""Where the tables of a verb are printed."""

import os
import sys

from rich.console import Console

WIDE_COLUMNS = 200
"""Of a file or a pipe, which cut nothing off."""


def table_console() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; wide where it is neither."""
    is_bound = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, highlight=False, width=None if is_bound else WIDE_COLUMNS)
