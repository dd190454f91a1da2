"""Questions on texts looked over."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from bertsmith.data.checkup.characters import HALF_CHARACTER, CharacterCheck
from bertsmith.data.checkup.findings import Finding, Source, Tally
from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.checkup.lengths import LengthCheck, Ruler
from bertsmith.data.checkup.normal import digest_of, normalised
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.reasons import Reasons
from bertsmith.data.checkup.repeats import (
    LEAK_ERROR_SHARE,
    DigestWriter,
    conflicting_labels,
    repeated_rows,
)
from bertsmith.data.checkup.tables import nothing_to_use, unreadable
from bertsmith.data.config import TableConfig
from bertsmith.data.questions.files import QuestionReader
from bertsmith.data.questions.question import Fault, Question
from bertsmith.errors import UserError

CUTS_TOKENS = (384, 512)
"""Usual lengths of a window."""

LONG_ANSWER_WORDS = 30
"""An answer has a token a word at least, and longer ones are not looked for by default."""


@dataclass(frozen=True, kw_only=True)
class QuestionSource(Source):
    """A file whose places are ways through it, numbered in their order."""

    places: list[str]

    def at(self, place: int) -> str:
        """The way to a question."""
        return self.places[place]

    def beside(self, place: int) -> str:
        """The same without the file."""
        return self.places[place].removeprefix(f"{self.paths[0]}").lstrip(": ")


class QuestionCheck:
    """Everything that is found in one pass over questions."""

    def __init__(self, path: Path, *, ruler: Ruler) -> None:
        self.path = path
        self._places: list[str] = []
        source = QuestionSource(paths=(path,), places=self._places)
        self._digests = DigestWriter(source)
        self._lengths = LengthCheck(ruler, source, cuts=CUTS_TOKENS)
        self._characters = CharacterCheck()
        self._unreadable = Reasons()
        self._faults: dict[Fault, Tally] = {
            "unreadable": self._unreadable,
            "misplaced": Tally(),
            "repeated": Tally(),
        }
        self._impossible, self._long = Tally(), Tally()
        self.contexts: dict[int, int] = {}
        """Questions on each context, by the digest of what is left when it is normalised."""

        self._seen = self._usable = 0
        self._damage: str | None = None

    def look(self) -> None:
        """Read every question; a file that is damaged is told in the findings."""
        try:
            for place, made in QuestionReader(self.path, TableConfig()).each():
                self._seen += 1
                if isinstance(made, Question):
                    self._look(made)
                else:
                    self._faults[made.fault].add(place, str(made))
        except UserError as error:
            self._damage = str(error)

    def _look(self, one: Question) -> None:
        self._usable += 1
        line = len(self._places)
        self._places.append(one.place)
        context = digest_of(normalised(one.context))
        texts = (one.question,) if context in self.contexts else (one.question, one.context)
        for text in texts:
            self._characters.look(text, lambda: one.place)
        self.contexts[context] = self.contexts.get(context, 0) + 1
        self._digests.add(line, (one.question, one.context), f"{digest_of(*one.golds):x}")
        self._lengths.add(
            line, tuple(HALF_CHARACTER.sub("\ufffd", text) for text in (one.question, one.context))
        )
        if not one.answers:
            self._impossible.add(one.place)
        elif min(len(gold.split()) for gold in one.golds) > LONG_ANSWER_WORDS:
            self._long.add(one.place)

    def part(self) -> Part:
        """What was found, all told."""
        digests = self._digests.finish()
        findings = self._question_findings()
        findings += self._characters.findings(self._usable, unit="questions")
        findings += repeated_rows(digests, unit="questions")
        findings += [_of_answers(finding) for finding in conflicting_labels(digests)]
        lengths = self._lengths.finish()
        findings += [_of_windows(finding) for finding in self._lengths.findings(unit="questions")]
        return Part(
            name=str(self.path),
            unit=f"questions on {number_of(len(self.contexts), 'context')}, "
            f"{self._impossible.count:,} without an answer",
            count=self._usable,
            digests=digests,
            labels=Counter(),
            first_lines={},
            label_kind=None,
            lengths=lengths,
            columns={},
            findings=findings,
        )

    def _question_findings(self) -> list[Finding]:
        total = self._seen
        found: list[Finding] = []
        if self._damage is not None:
            found.append(unreadable(self.path, self._damage))
        elif not self._usable:
            found.append(nothing_to_use(self.path, "question"))
        faults = self._faults
        found += faults["misplaced"].findings(
            "misplaced_answers",
            "error",
            "questions have an answer that does not stand where it says (the first: "
            f"{faults['misplaced'].example})",
            total=total,
            advice="Correct answer_start, which counts characters from 0.",
        )
        found += self._unreadable.unreadable_rows(
            "questions cannot be used",
            total=total,
            advice="Correct them, or leave them out with --table.bad_rows skip.",
        )
        found += faults["repeated"].findings(
            "repeated_ids",
            "error",
            f"questions have the id of another (the first: {faults['repeated'].example})",
            total=total,
            advice="Give each its own: predictions are told apart by it.",
        )
        found += self._impossible.findings(
            "impossible_questions",
            "note",
            "questions have no answer",
            total=total,
            advice="The model will learn to say so (SQuAD 2.0); see that this is meant.",
        )
        found += self._long.findings(
            "long_answers",
            "warning",
            f"questions have only answers of more than {LONG_ANSWER_WORDS} words",
            total=total,
            advice="Raise --answer.max_tokens, or they are never found whole.",
        )
        return found


def leaked_contexts(train: QuestionCheck, dev: QuestionCheck) -> list[Finding]:
    """Contexts to judge by that stand among those to learn from, whatever is asked of them."""
    leaked = [context for context in dev.contexts if context in train.contexts]
    if not leaked:
        return []
    share = len(leaked) / len(dev.contexts)
    return [
        Finding(
            check="leaked_contexts",
            severity="error" if share >= LEAK_ERROR_SHARE else "warning",
            what="contexts to judge by stand among those to learn from",
            count=len(leaked),
            total=len(dev.contexts),
            places=(),
            advice="Split by contexts, not by questions: else the score is one of known texts.",
        )
    ]


def _of_answers(finding: Finding) -> Finding:
    """A conflict between answers, of which several may be right."""
    return replace(
        finding,
        severity="warning" if finding.check == "conflicting_labels" else "note",
        what=finding.what.replace("rows hold a text", "questions on a text stand there twice")
        .replace(" that also stands with another label", ", with other answers")
        .replace(" that stands with another label", ", with other answers,"),
        places=tuple(place.partition(" (")[0] for place in finding.places),
        advice="Give one question all its answers.",
    )


def _of_windows(finding: Finding) -> Finding:
    """Nothing of a context is cut off."""
    if finding.check != "long_texts":
        return finding
    return replace(
        finding,
        check="long_contexts",
        severity="note",
        what=finding.what.replace("questions are", "questions with their context are"),
        advice="Such a context is read in windows that overlap; nothing of it is cut off.",
    )
