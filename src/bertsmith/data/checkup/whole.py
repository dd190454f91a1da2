"""A checkup as a whole: one file or set of files, or two that belong together."""

from dataclasses import dataclass
from typing import Any

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.findings import SEVERITIES, Finding, worst_first
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.repeats import leaked_rows

SCHEMA = 1
"""Of the JSON; a key that is there stays."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """What `bertsmith doctor` found."""

    kind: str
    """table, pairs, tagged, questions or text."""

    train: Part
    dev: Part | None
    findings: tuple[Finding, ...]
    """The worst first."""

    @property
    def is_fit(self) -> bool:
        """Whether training on it is not wrong: no finding is an error."""
        return not self.count("error")

    def count(self, severity: str) -> int:
        """Findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "is_fit": self.is_fit,
            "train": self.train.as_json(),
            "eval": None if self.dev is None else self.dev.as_json(),
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "findings": [finding.as_json() for finding in self.findings],
        }


def joined(
    kind: str, train: Part, dev: Part | None, *, findings: list[Finding] | None = None
) -> Checkup:
    """Both parts' findings, those of the two against each other, and others, the worst first."""
    found = [*(findings or []), *train.findings]
    if dev is not None:
        found += dev.findings + between(train, dev)
    agreed = [one if one.total <= 1 else one.after_its_count() for one in worst_first(found)]
    return Checkup(kind=kind, train=train, dev=dev, findings=tuple(agreed))


def between(train: Part, dev: Part) -> list[Finding]:
    """What is wrong with the part to judge by, seen from the one to learn from."""
    found = leaked_rows(train.digests, dev.digests, unit=train.unit)
    if train.label_kind in ("classes", "lists") and dev.label_kind != "scores":
        found += label_names.unseen(
            train.labels, dev.labels, dev.label_place, total=sum(dev.labels.values())
        )
    return found
