"""Tagged sentences looked over."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.characters import HALF_CHARACTER, CharacterCheck
from bertsmith.data.checkup.findings import Finding, Severity, Source, Tally
from bertsmith.data.checkup.lengths import LengthCheck, Ruler
from bertsmith.data.checkup.normal import digest_of
from bertsmith.data.checkup.part import Part
from bertsmith.data.checkup.reasons import Reasons
from bertsmith.data.checkup.repeats import DigestWriter, conflicting_labels, repeated_rows
from bertsmith.data.checkup.tables import nothing_to_use, unreadable
from bertsmith.data.checkup.tag_schemes import (
    SCHEMES_WITH_RULES,
    Scheme,
    SchemeFinder,
    broken_places,
    split_tag,
)
from bertsmith.data.checkup.tagged import TaggedSentence
from bertsmith.errors import UserError

BROKEN_ERROR_SHARE = 0.01
"""Of spans; below it a reader's repair changes no score that anybody could tell."""

Form = Literal["conll", "lists", "spans"]
"""How sentences are written: a token a line, lists of tokens and tags, texts and their spans."""

ADVICE: dict[Form, str] = {
    "conll": "Correct them: a token and its tag a line, a blank line between sentences.",
    "lists": "Correct them: a list of tokens and one as long of their tags in each row.",
    "spans": "Correct them: each span has start, end (counted in characters from 0, the end is the "
    "first behind it) and label, and no two share a word.",
}
"""What to do with those that cannot be read."""


class SentenceCheck:
    """Everything that is found in one pass over tagged sentences.

    The scheme is known only at the end, so the rules of all are looked at on the way.
    """

    def __init__(self, path: Path, *, form: Form, ruler: Ruler) -> None:
        self.path, self.source = path, Source(paths=(path,))
        self._form = form
        source = self.source
        self._characters, self._schemes = CharacterCheck(), SchemeFinder()
        self._digests, self._lengths = DigestWriter(source), LengthCheck(ruler, source)
        self._faults = Reasons()
        self._uneven, self._empty, self._blank = (Tally() for _ in range(3))
        self._broken: dict[Scheme, Tally] = {scheme: Tally() for scheme in SCHEMES_WITH_RULES}
        self._tags: Counter[str] = Counter()
        self._first_lines: dict[str, int] = {}
        self._sentences = self._usable = self._spans = 0
        self._damage: str | None = None

    def look(self, sentences: Iterable[TaggedSentence]) -> None:
        """Read every sentence; a file that ends in damage is told in the findings."""
        try:
            for sentence in sentences:
                self._sentences += 1
                self._look(sentence)
        except UserError as error:
            self._damage = str(error)

    def _look(self, sentence: TaggedSentence) -> None:
        place = self.source.at(sentence.line)
        if sentence.fault is not None:
            is_uneven = bool(sentence.tokens) and len(sentence.tokens) != len(sentence.tags)
            (self._uneven if is_uneven else self._faults).add(place, sentence.fault)
            return
        if not sentence.tokens:
            self._empty.add(place)
            return
        self._usable += 1
        tokens, tags = sentence.tokens, sentence.tags
        if not all(token.strip() for token in tokens):
            self._blank.add(place)
        text = " ".join(tokens)
        self._characters.look(text, lambda: place)
        self._digests.add(sentence.line, (text,), f"{digest_of(*tags):x}")
        self._lengths.add(sentence.line, (HALF_CHARACTER.sub("\ufffd", text),))
        self._schemes.add(tags)
        for line, tag in zip(sentence.lines, tags, strict=True):
            self._tags[tag] += 1
            self._first_lines.setdefault(tag, line)
            self._spans += split_tag(tag)[0] in ("B", "S")
        for scheme, broken in self._broken.items():
            for index, why in broken_places(tags, scheme):
                broken.add(self.source.at(sentence.lines[min(index, len(tags) - 1)]), why)

    def part(self) -> Part:
        """What was found, all told."""
        scheme = self._schemes.scheme()
        digests = self._digests.finish()
        findings = self._sentence_findings()
        findings += self._broken_sequences(scheme)
        findings += self._characters.findings(self._usable, unit="sentences")
        findings += repeated_rows(digests, unit="sentences")
        findings += [_of_tags(f) for f in conflicting_labels(digests)]
        lengths = self._lengths.finish()
        findings += self._lengths.findings(unit="sentences")
        return Part(
            name=str(self.path),
            unit="sentences",
            count=self._usable,
            digests=digests,
            labels=self._tags,
            first_lines=self._first_lines,
            label_kind="classes",
            lengths=lengths,
            columns={"scheme": scheme},
            findings=findings,
        )

    def _sentence_findings(self) -> list[Finding]:
        total = self._sentences
        found: list[Finding] = []
        if self._damage is not None:
            found.append(unreadable(self.path, self._damage))
        elif not self._usable:
            found.append(nothing_to_use(self.path, "sentence"))
        found += self._uneven.findings(
            "tokens_without_tags",
            "error",
            f"sentences have not as many tags as tokens (the first: {self._uneven.example})",
            total=total,
            advice="Give each token one tag: every tag behind the gap goes to a wrong token.",
        )
        found += self._faults.unreadable_rows(
            "sentences cannot be read",
            total=total,
            advice=ADVICE[self._form],
        )
        found += self._empty.findings(
            "empty_texts",
            "warning",
            "sentences have no token",
            total=total,
            advice="Delete them.",
        )
        found += self._blank.findings(
            "blank_tokens",
            "warning",
            "sentences have a token of white space alone",
            total=total,
            advice="Delete the token and its tag: a tokenizer gives it no place.",
        )
        return found

    def _broken_sequences(self, scheme: Scheme) -> list[Finding]:
        """Tags that follow no tag they may follow."""
        broken = self._broken.get(scheme, Tally())
        total = max(self._spans, broken.count)
        share = broken.count / max(total, 1)
        severity: Severity = "error" if share >= BROKEN_ERROR_SHARE else "warning"
        return broken.findings(
            "invalid_tag_sequences",
            severity,
            f"tags break the rules of {scheme.upper()} (the first: {broken.example})",
            total=total,
            advice="Correct them, or each is read as a span of its own.",
        )


def tag_findings(part: Part) -> list[Finding]:
    """What is odd about the names of tags; their balance is never even, and is not told."""
    counts, place = part.labels, part.label_place
    if len(counts) == 1:
        return label_names.balance(counts, place, total=sum(counts.values()))
    kinds: Counter[str] = Counter()
    first_tag: dict[str, str] = {}
    for tag, count in counts.items():  # a slip is one of the type: B and E are near, and right
        kind = split_tag(tag)[1] or tag
        kinds[kind] += count
        first_tag.setdefault(kind, tag)
    slips = label_names.typos(kinds, lambda kind: place(first_tag[kind]))
    return [*slips, *label_names.rare_labels(counts, place)]


def _of_tags(finding: Finding) -> Finding:
    """A conflict between sentences, most of whose tags agree: no error, and no tags are shown."""
    is_exact = finding.check == "conflicting_labels"
    return replace(
        finding,
        severity="warning" if is_exact else "note",
        what=finding.what.replace("rows hold a text", "sentences hold a text").replace(
            "another label", "other tags"
        ),
        places=tuple(place.partition(" (")[0] for place in finding.places),
        advice="Decide on one tagging of each sentence: the model cannot learn both.",
    )
