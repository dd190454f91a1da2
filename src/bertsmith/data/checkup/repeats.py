"""Rows that stand twice, disagree with themselves, or stand on both sides of a split.

Shape legend: N rows.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.checkup.findings import PLACES_KEPT, Finding, Severity, Source, shortened
from bertsmith.data.checkup.normal import digest_of, normalised

MANY_REPEATS_SHARE = 0.1
"""Repeated rows above this weigh as much as an epoch more of them."""

CONFLICT_ERROR_SHARE = 0.05
"""Rows with contradicting labels above this cap what any model can score."""

LEAK_ERROR_SHARE = 0.1
"""A score of which so much is memory says nothing of new texts."""


@dataclass(frozen=True, kw_only=True)
class RowDigests:
    """Rows by 20 bytes and a line number each, in their order."""

    source: Source
    lines_N: NDArray[np.int64]
    exact_N: NDArray[np.uint64]
    """Of the texts as they stand."""

    normal_N: NDArray[np.uint64]
    """Of the texts after `normalised`."""

    labels_N: NDArray[np.int32]
    """Place of the label in `names`; -1 for none."""

    names: tuple[str, ...]
    """Distinct labels, in the order in which they come."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.lines_N)

    def at(self, row: int) -> str:
        """Where a row stands."""
        return self.source.at(int(self.lines_N[row]))

    def counts(self) -> NDArray[np.int64]:
        """Rows of each name."""
        used = self.labels_N[self.labels_N >= 0]
        return np.bincount(used, minlength=len(self.names)).astype(np.int64)


class DigestWriter:
    """Takes rows one by one, and keeps no text of them but the names of labels."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines, self._labels = array("q"), array("i")
        self._exact, self._normal = array("Q"), array("Q")
        self._ids: dict[str, int] = {}

    def add(self, line: int, texts: Sequence[str], label: str | None) -> None:
        """A row that can be used."""
        self._lines.append(line)
        self._exact.append(digest_of(*texts))
        self._normal.append(digest_of(*map(normalised, texts)))
        self._labels.append(-1 if label is None else self._ids.setdefault(label, len(self._ids)))

    def finish(self) -> RowDigests:
        """All rows so far."""
        return RowDigests(
            source=self._source,
            lines_N=np.array(self._lines, dtype=np.int64),
            exact_N=np.array(self._exact, dtype=np.uint64),
            normal_N=np.array(self._normal, dtype=np.uint64),
            labels_N=np.array(self._labels, dtype=np.int32),
            names=tuple(self._ids),
        )


def without_label(rows: RowDigests, name: str) -> RowDigests:
    """All rows but those with one label."""
    is_kept_N = rows.labels_N != rows.names.index(name)
    return replace(
        rows,
        lines_N=rows.lines_N[is_kept_N],
        exact_N=rows.exact_N[is_kept_N],
        normal_N=rows.normal_N[is_kept_N],
        labels_N=rows.labels_N[is_kept_N],
    )


def repeated_rows(rows: RowDigests, *, unit: str = "rows") -> list[Finding]:
    """Rows whose texts and label, if they have one, stand in an earlier row."""
    keys_N = rows.exact_N ^ (rows.labels_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    first_N = _first_with_same(keys_N)
    repeats = np.flatnonzero(first_N != np.arange(len(rows)))
    share = len(repeats) / max(len(rows), 1)
    severity: Severity = "warning" if share >= MANY_REPEATS_SHARE else "note"
    return _findings(
        "repeated_rows",
        severity,
        f"{unit} repeat an earlier one" + (", label and all" if rows.names else ""),
        repeats,
        lambda row: f"{rows.at(row)} (as {rows.source.beside(int(rows.lines_N[first_N[row]]))})",
        total=len(rows),
        advice="Remove them, unless texts that come often shall weigh more.",
    )


def conflicting_labels(rows: RowDigests, *, is_score: bool = False) -> list[Finding]:
    """Rows whose texts also stand with another label; exactly, then only after normalising."""
    exact = _conflicts(rows, rows.exact_N)
    share = len(exact) / max(len(rows), 1)
    severity: Severity = "error" if share >= CONFLICT_ERROR_SHARE else "warning"
    found = _findings(
        "conflicting_labels",
        "note" if is_score else severity,
        "rows hold a text that also stands with another label",
        exact,
        lambda row: f"{rows.at(row)} ({_label(rows, row)})",
        total=len(rows),
        advice="Take the mean of the scores of a text."
        if is_score
        else "Decide on one label for each text: the model cannot learn both.",
    )
    return found + _findings(
        "conflicting_labels_normalised",
        "note",
        "rows hold a text that stands with another label but for case, white space or punctuation",
        np.setdiff1d(_conflicts(rows, rows.normal_N), exact),
        lambda row: f"{rows.at(row)} ({_label(rows, row)})",
        total=len(rows),
        advice="Look at them: the difference is seldom what the label depends on.",
    )


def leaked_rows(
    train: RowDigests, dev: RowDigests, *, unit: str = "rows", skip_exact: bool = False
) -> list[Finding]:
    """Rows to judge by whose texts stand among those to learn from.

    Args:
        train: What is learned from.
        dev: What is judged by.
        unit: What a row is called.
        skip_exact: Whether those that are the same to the letter are told elsewhere.
    """
    is_exact_N = np.isin(dev.exact_N, train.exact_N)
    is_normal_N = np.isin(dev.normal_N, train.normal_N) & ~is_exact_N
    normal_how = " but for case, white space or punctuation"
    findings = []
    for check, is_leaked_N, how, train_N, dev_N in (
        ("leaked_rows", is_exact_N, "", train.exact_N, dev.exact_N),
        ("leaked_rows_normalised", is_normal_N, normal_how, train.normal_N, dev.normal_N),
    ):
        if skip_exact and check == "leaked_rows":
            continue
        leaked = np.flatnonzero(is_leaked_N)
        severity: Severity = "error" if len(leaked) >= LEAK_ERROR_SHARE * len(dev) else "warning"
        findings += _findings(
            check,
            severity,
            f"{unit} to judge by stand among those to learn from{how}",
            leaked,
            partial(_leak_place, train, dev, train_N, dev_N),
            total=len(dev),
            advice="Remove them from one side: the score counts what was learned by heart.",
        )
    return findings


def _leak_place(
    train: RowDigests,
    dev: RowDigests,
    train_N: NDArray[np.uint64],
    dev_N: NDArray[np.uint64],
    row: int,
) -> str:
    """A leaked row, and the first row to learn from with its key.

    Looked for anew for each place that is shown: they are few, and no table of keys is kept.
    """
    first = int(np.argmax(train_N == dev_N[row]))
    return f"{dev.at(row)} (as {train.at(first)})"


def _label(rows: RowDigests, row: int) -> str:
    return shortened(rows.names[int(rows.labels_N[row])])


def _first_with_same(keys_N: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each row the first one with its key."""
    _, first, inverse = np.unique(keys_N, return_index=True, return_inverse=True)
    found: NDArray[np.int64] = first[inverse]
    return found


def _conflicts(rows: RowDigests, keys_N: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Rows of groups with one key and several labels, group by group, in order of the first."""
    labelled = np.flatnonzero(rows.labels_N >= 0)
    if not len(labelled):
        return labelled
    keys, labels = keys_N[labelled], rows.labels_N[labelled]
    first = _first_with_same(keys)
    is_mixed = np.zeros(len(labelled), dtype=np.bool_)
    is_mixed[first[labels != labels[first]]] = True
    in_mixed = np.flatnonzero(is_mixed[first])
    order = np.argsort(first[in_mixed], kind="stable")
    found: NDArray[np.int64] = labelled[in_mixed[order]]
    return found


def _findings(
    check: str,
    severity: Severity,
    what: str,
    found: NDArray[np.int64],
    place: Callable[[int], str],
    *,
    total: int,
    advice: str,
) -> list[Finding]:
    if not len(found):
        return []
    places = tuple(place(int(row)) for row in found[:PLACES_KEPT])
    return [
        Finding(
            check=check,
            severity=severity,
            what=what,
            count=len(found),
            total=total,
            places=places,
            advice=advice,
        )
    ]
