"""What a checkup finds: how bad, what, how often, where first, and what to do."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bertsmith.data.checkup.grammar import agreeing
from bertsmith.data.compressed import ending_of

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first. An error makes training, or its scores, wrong; a warning may; a note is good to
know."""

PLACES_KEPT = 5
"""First places of a finding that are named."""

FILE_STEP = 1 << 40
"""More than the lines of any file."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of problem, with all its places counted."""

    check: str
    """A name that never changes, for programs."""

    severity: Severity

    what: str
    """What is the matter, in words that follow a count."""

    count: int
    """Rows (sentences, documents, labels or columns, as `what` says)."""

    total: int
    """Of so many."""

    places: tuple[str, ...]
    """The first of them, as ``file:line``."""

    advice: str
    """One sentence: what to do."""

    @property
    def share(self) -> float:
        """Of all, from 0 to 1."""
        return self.count / self.total if self.total else 0.0

    def after_its_count(self) -> "Finding":
        """The same in words that agree with the count before them."""
        return replace(self, what=agreeing(self.what, self.count))

    def as_json(self) -> dict[str, Any]:
        """Every field under its own name, and the share."""
        return {
            "check": self.check,
            "severity": self.severity,
            "what": self.what,
            "count": self.count,
            "total": self.total,
            "share": self.share,
            "places": list(self.places),
            "advice": self.advice,
        }


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files, and how a place in them is named.

    A place is a number: the line (in Parquet, the row), from 1, and the file's position times
    `FILE_STEP`, so that an array of numbers is enough for all rows of all files.
    """

    paths: tuple[Path, ...]

    def at(self, place: int) -> str:
        """``file:line``; in Parquet ``file, row n``."""
        path, line = self.paths[place // FILE_STEP], place % FILE_STEP
        return f"{path}, row {line}" if ending_of(path) == ".parquet" else f"{path}:{line}"

    def beside(self, place: int) -> str:
        """The same after a place of the same source was named: the file is known if it is one."""
        return f"line {place}" if len(self.paths) == 1 else self.at(place)


@dataclass(kw_only=True)
class Tally:
    """Counts something and remembers where it stood first."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    example: str = ""
    """What was said of the first."""

    def add(self, place: str, example: str = "") -> None:
        """One more."""
        self.count += 1
        if len(self.places) < PLACES_KEPT:
            self.places.append(place)
        self.example = self.example or example

    def findings(
        self, check: str, severity: Severity, what: str, *, total: int, advice: str
    ) -> list[Finding]:
        """The finding, or none where nothing was counted."""
        if not self.count:
            return []
        return [
            Finding(
                check=check,
                severity=severity,
                what=what,
                count=self.count,
                total=total,
                places=tuple(self.places),
                advice=advice,
            )
        ]


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors, warnings, notes; within each the order of the checks."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def shortened(text: str, *, characters: int = 40) -> str:
    """Quoted for a line, its end left out where it is long."""
    return repr(text if len(text) <= characters else text[: characters - 3] + "...")
