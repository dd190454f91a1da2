"""Texts without labels looked over: what a model is pretrained on.

Shape legend: N documents, L lines of them.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from bertsmith.data.checkup.characters import HALF_CHARACTER, CharacterCheck
from bertsmith.data.checkup.findings import FILE_STEP, Finding, Severity, Source, Tally
from bertsmith.data.checkup.lengths import LengthCheck, Ruler
from bertsmith.data.checkup.normal import digest_of
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.repeats import DigestWriter, repeated_rows
from bertsmith.data.checkup.tables import nothing_to_use
from bertsmith.data.corpus import Document

LONG_CHARACTERS = 1_000_000
"""A longer document is a file without blank lines, more often than a book."""

MOST_LINES = 20_000_000
"""Lines whose digests are kept (8 bytes each); those of later documents are not compared."""

OFTEN_DOCUMENTS = 10
"""A line in so many documents, and in 1 % of them, is a header, a footer or a menu."""

BOILERPLATE_SHARE = 0.05
MOSTLY_REPEATED_SHARE = 0.5
FEWEST_DOCUMENTS = 100
"""Of fewer documents nothing is said about lines that come in many."""


class DocumentCheck:
    """Everything that is found in one pass over documents."""

    def __init__(self, source: Source, *, ruler: Ruler) -> None:
        self.source = source
        self._characters = CharacterCheck()
        self._digests, self._lengths = DigestWriter(source), LengthCheck(ruler, source)
        self._empty, self._bad, self._long = (Tally() for _ in range(3))
        self._lines_L = array("Q")
        self._documents = self._usable = 0

    def look(self, documents: Iterable[Document], *, file: int = 0) -> None:
        """Read the documents of one of the source's files."""
        for document in documents:
            self._documents += 1
            code = file * FILE_STEP + document.line
            at = self.source.at(code)
            if document.is_bad:
                self._bad.add(at)
            elif not document.text.strip():
                self._empty.add(at)
            else:
                self._look(document.text, code, at)

    def _look(self, text: str, code: int, at: str) -> None:
        self._usable += 1
        if len(text) >= LONG_CHARACTERS:
            self._long.add(at, f"{len(text):,} characters")
        self._characters.look(text, lambda: at)
        self._digests.add(code, (text,), None)
        self._lengths.add(code, (HALF_CHARACTER.sub("\ufffd", text),))
        if len(self._lines_L) < MOST_LINES:
            lines = {line.strip() for line in text.split("\n")} - {""}
            if len(lines) > 1:  # a document of one line is repeated as a whole, and told as that
                self._lines_L.extend(map(digest_of, lines))

    def part(self, name: str) -> Part:
        """What was found, all told."""
        total = self._documents
        digests = self._digests.finish()
        findings = [
            *([] if self._usable else [nothing_to_use(name, "document")]),
            *self._bad.findings(
                "undecodable_documents",
                "error",
                "documents are not UTF-8, or not what their file's ending says",
                total=total,
                advice="Convert them, or leave them out with prepare --bad_bytes skip.",
            ),
            *self._empty.findings(
                "empty_texts",
                "note",
                "documents are empty",
                total=total,
                advice="prepare leaves them out.",
            ),
            *self._long.findings(
                "very_long_documents",
                "note",
                f"documents are of a million characters or more (the first: {self._long.example})",
                total=total,
                advice="If texts are a line each, say --documents line; else they are cut up.",
            ),
            *self._characters.findings(self._usable, unit="documents"),
            *self._lines_in_many(),
        ]
        for finding in repeated_rows(digests, unit="documents"):
            findings.append(_as_documents(finding))
        return Part(
            name=name,
            unit="documents",
            count=self._usable,
            digests=digests,
            labels=Counter(),
            first_lines={},
            label_kind=None,
            lengths=self._lengths.finish(),
            columns={},
            findings=findings
            + [f for f in self._lengths.findings(unit="documents") if f.check == "unknown_tokens"],
        )

    def _lines_in_many(self) -> list[Finding]:
        if self._usable < FEWEST_DOCUMENTS or not self._lines_L:
            return []
        lines_L = np.array(self._lines_L, dtype=np.uint64)
        _, counts = np.unique(lines_L, return_counts=True)
        often = counts[counts >= max(OFTEN_DOCUMENTS, self._usable // 100)]
        if not len(often) or often.sum() < BOILERPLATE_SHARE * len(lines_L):
            return []
        return [
            Finding(
                check="lines_in_many_documents",
                severity="warning",
                what=f"lines of documents are among the {len(often):,} that "
                f"{'comes' if len(often) == 1 else 'come'} in at least "
                f"{max(OFTEN_DOCUMENTS, self._usable // 100):,} documents each",
                count=int(often.sum()),
                total=len(lines_L),
                places=(),
                advice="Take headers, footers and menus out: the model would learn them by heart.",
            )
        ]


def _as_documents(finding: Finding) -> Finding:
    """Repeated documents weigh in pretraining only if prepare keeps them; it leaves them out."""
    severity: Severity = "warning" if finding.share >= MOSTLY_REPEATED_SHARE else "note"
    return Finding(
        check="repeated_documents",
        severity=severity,
        what="documents repeat an earlier one",
        count=finding.count,
        total=finding.total,
        places=finding.places,
        advice="prepare leaves them out; is the right field or file read, if they are many?",
    )
