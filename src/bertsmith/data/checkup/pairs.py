"""Pairs of texts looked over, as `finetune --task embedding` reads them.

Shape legend: N pairs.
"""

from array import array
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bertsmith.data.checkup.columns import ColumnCheck, TextColumnCheck
from bertsmith.data.checkup.findings import PLACES_KEPT, Finding, Source, Tally, shortened
from bertsmith.data.checkup.label_names import NUMBER
from bertsmith.data.checkup.lengths import Ruler
from bertsmith.data.checkup.normal import digest_of
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.repeats import (
    DigestWriter,
    RowDigests,
    conflicting_labels,
    repeated_rows,
)
from bertsmith.data.checkup.row_texts import ADVICE_SKIP, RowTexts, read_through
from bertsmith.data.checkup.tables import nothing_to_use, unreadable
from bertsmith.data.columns import PAIRS, Columns, UsualColumns, find_columns
from bertsmith.data.config import TableConfig
from bertsmith.data.pair_tables import beside_texts, is_negative_column
from bertsmith.data.table_files import Record, Records
from bertsmith.data.tables import is_missing, label_name
from bertsmith.errors import UserError

COMMON_ROWS = 10
"""Pairs with the same first text, from which a step of usual size often holds two of them."""

LARGEST_SCORE = float(np.finfo(np.float32).max)


def has_pairs(names: tuple[str, ...], config: TableConfig) -> bool:
    """Whether a table with these columns has two texts a row, said or by their names."""
    lower = {name.lower() for name in names}
    is_named = config.text_column is None and any(set(pair) <= lower for pair in PAIRS)
    return config.pair_column is not None or is_named


def pair_columns(
    names: tuple[str, ...], *, path: Path, config: TableConfig, usual: UsualColumns | None
) -> Columns:
    """Columns of two texts, with that of the score or the negatives for a label, if there is one.

    Args:
        names: The table's columns.
        path: Of the table, for messages.
        config: Columns that the user named.
        usual: Those of the table to learn from.

    Raises:
        UserError: There are no two texts, or several columns could be the score.
    """
    if config.label_columns is not None:
        raise UserError("--table.label_columns: are for labels, and --kind pairs has none")
    find = partial(find_columns, names, path=path, is_pair=True, usual=usual)
    if config.label_column is not None:
        return find(config=config, is_labelled=True)
    columns = find(config=config, is_labelled=False)
    beside = beside_texts(columns, path=path, usual=usual)
    return columns if beside is None else replace(columns, label=names.index(beside))


class PairCheck:
    """Everything that is found in one pass over a table of pairs."""

    def __init__(self, path: Path, columns: Columns, *, ruler: Ruler, is_sure: bool) -> None:
        """Look at nothing yet.

        Args:
            path: Of the table.
            columns: As `pair_columns` finds them.
            ruler: Measures lengths.
            is_sure: Whether the user says that it holds pairs; else labels may be in columns of
                their own.
        """
        assert columns.pair is not None, "found so"
        self.path, self.source = path, Source(paths=(path,))
        self._columns, self._is_sure = columns, is_sure
        cells = [columns.text, columns.pair]
        self._score_at: int | None = None
        if columns.label is not None:
            if is_negative_column(columns.label_name):
                cells.append(columns.label)
            else:
                self._score_at = columns.label
        self._role = "score" if self._score_at is not None else "negative"
        used = {*cells} if columns.label is None else {*cells, columns.label}
        self._others = ColumnCheck(columns.names, used=used)
        self._texts = RowTexts(columns, cells=cells, source=self.source, ruler=ruler, is_apart=True)
        self._text_column = TextColumnCheck()
        self._digests = DigestWriter(self.source)
        self._whole, self._anchors = array("Q"), array("Q")
        self._scores: Counter[str] = Counter()
        self._first_lines: dict[str, int] = {}
        self._missing, self._odd, self._equal, self._equal_negatives = (Tally() for _ in range(4))
        self._usable = 0
        self._damage: str | None = None

    def look(self, records: Records) -> None:
        """Read every row; a file that ends in damage is told in the findings."""
        self._damage = read_through(records, self._row)

    def _row(self, record: Record) -> None:
        line = record.row if record.line is None else record.line
        place = partial(self.source.at, line)
        texts = self._texts.take(record, place)
        if record.fault is not None:
            return
        score = None
        if self._score_at is not None:
            score = self._score(record.values[self._score_at], place())
        self._others.add(record.values, None)
        if texts is None or (self._score_at is not None and score is None):
            return
        self._usable += 1
        self._texts.look(line, texts, place)
        self._text_column.add(line, texts[0], None)
        anchor, second, *negatives = (text.strip() for text in texts)
        if anchor == second:
            self._equal.add(place())
        if any(negative in (anchor, second) for negative in negatives):
            self._equal_negatives.add(place())
        self._digests.add(line, texts[:2], score)
        self._whole.append(digest_of(*texts))
        self._anchors.append(digest_of(texts[0]))
        if score is not None:
            self._scores[score] += 1
            self._first_lines.setdefault(score, line)

    def _score(self, cell: object, place: str) -> str | None:
        """The number as it is written once for all its ways."""
        if is_missing(cell):
            self._missing.add(place)
            return None
        is_number = isinstance(cell, int | float | str) and not isinstance(cell, bool)
        if is_number and NUMBER.fullmatch(word := str(cell).strip()):
            number = float(word)
            if abs(number) <= LARGEST_SCORE:
                return label_name(number)
        self._odd.add(place, shortened(str(cell)))
        return None

    def part(self) -> Part:
        """What was found, all told."""
        columns, digests = self._columns, self._digests.finish()
        whole = replace(digests, exact_N=np.array(self._whole, dtype=np.uint64))
        roles = {"text": columns.text_name, "pair": columns.pair_name or ""}
        if columns.label is not None:
            roles[self._role] = columns.label_name
        has_score = self._score_at is not None
        findings = self._row_findings()
        findings += self._text_column.findings(self.source, columns.text_name, num_labels=0)
        has_label = columns.label is not None or self._is_sure
        findings += self._others.findings(self.source, has_label=has_label)
        findings += self._texts.text_findings(self._usable, unit="pairs")
        findings += repeated_rows(whole, unit="pairs")
        if has_score:
            findings += [_of_scores(f) for f in conflicting_labels(digests, is_score=True)]
        else:
            findings += self._common_anchors(digests)
        return Part(
            name=str(self.path),
            unit="pairs",
            count=self._usable,
            digests=digests,
            labels=self._scores,
            first_lines=self._first_lines,
            label_kind="scores" if self._scores else None,
            lengths=self._texts.lengths(),
            columns=roles,
            findings=findings,
        )

    def _row_findings(self) -> list[Finding]:
        total = self._texts.rows
        found: list[Finding] = []
        if self._damage is not None:
            found.append(unreadable(self.path, self._damage))
        if not self._usable:
            found.append(nothing_to_use(self.path, "row"))
        return [
            *found,
            *self._texts.row_findings(),
            *self._missing.findings(
                "missing_scores",
                "error",
                "rows have no score",
                total=total,
                advice=f"Give each one, {ADVICE_SKIP}",
            ),
            *self._odd.findings(
                "scores_that_are_no_numbers",
                "error",
                f"rows have a score that is no finite number (the first: {self._odd.example})",
                total=total,
                advice=f"Correct them, {ADVICE_SKIP} If it is no score at all, name the right "
                "column with --label_column.",
            ),
            *self._equal.findings(
                "equal_texts",
                "warning" if self._score_at is None else "note",
                "rows have the same text twice",
                total=total,
                advice="Remove them: two equal texts have the same embedding untaught."
                if self._score_at is None
                else "Their cosine is 1, whatever is learned; see that their score says so.",
            ),
            *self._equal_negatives.findings(
                "equal_negatives",
                "warning",
                "rows have a negative that equals their first or their second text",
                total=total,
                advice="Training leaves such a negative out; give the rows another.",
            ),
        ]

    def _common_anchors(self, digests: RowDigests) -> list[Finding]:
        """First texts of many rows."""
        anchors_N = np.array(self._anchors, dtype=np.uint64)
        _, first, counts = np.unique(anchors_N, return_index=True, return_counts=True)
        is_common = counts >= COMMON_ROWS
        if not is_common.any():
            return []
        places = np.sort(first[is_common])[:PLACES_KEPT]
        return [
            Finding(
                check="common_anchors",
                severity="note",
                what=f"pairs have a first text that {COMMON_ROWS} or more have",
                count=int(counts[is_common].sum()),
                total=len(anchors_N),
                places=tuple(digests.at(int(row)) for row in places),
                advice="Pairs with one first text are no negatives of each other: the more of them "
                "a step holds, the less it teaches.",
            )
        ]


def score_findings(train: Part, dev: Part | None) -> list[Finding]:
    """What is odd about the scores of pairs to learn from, and of those to judge them by."""
    found: list[Finding] = []
    if len(train.labels) == 1:
        (score,) = train.labels
        found.append(
            Finding(
                check="one_score",
                severity="error",
                what=f"pairs all have the one score {score}",
                count=train.count,
                total=train.count,
                places=(train.label_place(score),),
                advice="There is nothing to learn: is this the right column (--label_column)?",
            )
        )
    for role in ("score", "negative"):
        if dev is not None and dev.columns and role in train.columns and role not in dev.columns:
            found.append(
                Finding(
                    check="no_label_column",
                    severity="error",
                    what=f"table to judge by has no column of the {role}, as that to learn from",
                    count=1,
                    total=1,
                    places=(dev.name,),
                    advice=f"Give it a column {train.columns[role]!r}.",
                )
            )
    return found


def taken_for_pairs(path: Path) -> Finding:
    """What is said where the columns alone show that a table holds pairs to embed."""
    return Finding(
        check="taken_for_pairs",
        severity="note",
        what="table has two texts a row and no label: it is taken for pairs to embed",
        count=1,
        total=1,
        places=(str(path),),
        advice="Train on it with --task embedding, or name the column of a label with "
        "--label_column; --kind pairs says that it is meant.",
    )


def _of_scores(finding: Finding) -> Finding:
    """Two scores of a pair."""
    return replace(
        finding,
        what=finding.what.replace("rows hold a text that", "pairs")
        .replace("stands", "stand")
        .replace("another label", "another score"),
        advice=finding.advice.replace("a text", "a pair"),
    )
