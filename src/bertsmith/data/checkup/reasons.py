"""Rows that no reader can use, and the kinds of reasons for it."""

import re
from dataclasses import dataclass, field

from bertsmith.data.checkup.findings import Finding, Tally

REASONS_SHOWN = 3

_OWN_WORDS = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""What differs between two messages of a kind: numbers, and words of the file."""

_OF_BYTES = re.compile(r"byte \d+ of the file is not UTF-8")


@dataclass(kw_only=True)
class Reasons(Tally):
    """Counts rows with what is said of each, and keeps the first of every kind of reason."""

    first_of_kind: dict[str, str] = field(default_factory=dict)
    """What was said of the first of a kind, with its place; of as many kinds as are shown, and one
    more, which tells that there are others."""

    def add(self, place: str, example: str = "") -> None:
        """One more."""
        super().add(place, example)
        kind = _OWN_WORDS.sub("", example)
        if kind not in self.first_of_kind and len(self.first_of_kind) <= REASONS_SHOWN:
            self.first_of_kind[kind] = f"{example}, {place}"

    def unreadable_rows(self, what: str, *, total: int, advice: str) -> list[Finding]:
        """The finding; none where bytes that are not UTF-8 are all there is: they are told already.

        Args:
            what: Such as "rows cannot be read".
            total: Of so many.
            advice: What to do.
        """
        if len(self.first_of_kind) == 1 and _OF_BYTES.match(self.example):
            return []
        told = f"the first: {self.example}"
        if len(self.first_of_kind) > 1:
            shown = list(self.first_of_kind.values())
            told = "; ".join(shown[:REASONS_SHOWN])
            told += "; and others" if len(shown) > REASONS_SHOWN else ""
        return self.findings(
            "unreadable_rows", "error", f"{what} ({told})", total=total, advice=advice
        )
