"""What every task's metrics can be asked for, and tables of scores as plain text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """A table to print."""

    title: str
    headings: Sequence[str]
    """The first column names its row; the others are numbers."""

    rows: Sequence[Sequence[str]]


class Metrics(Protocol):
    """Scores over a whole table."""

    @property
    def num_examples(self) -> int:
        """Rows that were scored."""
        ...

    def by_name(self) -> dict[str, float]:
        """The overall scores by their names, without those that are not defined."""
        ...

    def details(self) -> Mapping[str, object]:
        """What JSON output holds besides."""
        ...

    def tables(self) -> Sequence[ScoreTable]:
        """What is printed besides."""
        ...
