"""Tags of any scheme as IOB2, which is what is learned; tags of no scheme as they are.

Source:
    Tjong Kim Sang and De Meulder 2003 (conlleval): a tag that goes on with nothing begins a span.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.data.checkup.tag_schemes import (
    Scheme,
    SchemeFinder,
    broken_places,
    split_tag,
)
from bertsmith.data.tagging.sentences import Sentence
from bertsmith.errors import UserError

STRAY_SHARE = 0.1
"""Of the tags, so many at most that are none of a span's are taken for faults among those that
are."""

SCHEME_NAMES: dict[Scheme, str] = {
    "plain": "plain tags",
    "io": "IO",
    "iob1": "IOB1",
    "iob2": "IOB2",
    "bioes": "BIOES (BILOU)",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """In which scheme a file's tags are, and what was made of them."""

    sentences: tuple[Sentence, ...]
    """With tags in IOB2, or as they were if they are plain."""

    scheme: Scheme
    num_repaired: int
    """Tags that broke their scheme's rules and were read as conlleval reads them."""

    first_repaired: str | None
    """What was wrong with the first of them, and where."""

    @property
    def has_spans(self) -> bool:
        """Whether tags are those of spans."""
        return self.scheme != "plain"

    def describe(self, path: Path) -> list[str]:
        """Lines for people."""
        into = ", learned as IOB2" if self.scheme in ("io", "iob1", "bioes") else ""
        lines = [f"tags of {path}: {SCHEME_NAMES[self.scheme]}{into}"]
        if self.num_repaired:
            lines.append(
                f"warning: {self.num_repaired:,} tags of {path} break the rules of their scheme "
                f"and were read as conlleval reads them (the first: {self.first_repaired})"
            )
        return lines


def to_iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags of spans, in whichever scheme, as IOB2; every span begins with B."""
    found = []
    before, kind_before = "O", ""
    for tag in tags:
        position, kind = split_tag(tag)
        goes_on = position in ("I", "E") and before in ("B", "I") and kind_before == kind
        found.append("O" if position == "O" else f"{'I' if goes_on else 'B'}-{kind}")
        before, kind_before = position, kind
    return tuple(found)


def in_iob2(sentences: Sequence[Sentence], *, path: Path) -> Found:
    """Find the scheme of a file's tags and convert them.

    Args:
        sentences: All of a file, with tags.
        path: The file.

    Raises:
        UserError: A few tags among those of spans are of no scheme.
    """
    finder = SchemeFinder()
    num_tags, strays = 0, []
    for sentence in sentences:
        num_tags += len(sentence.tags)
        for i, tag in enumerate(sentence.tags):
            if split_tag(tag)[0] == "":
                strays.append((sentence, i))
    if strays and len(strays) <= STRAY_SHARE * num_tags:
        sentence, i = strays[0]
        raise UserError(
            f"{path}:{sentence.lines[i]}: the tag {sentence.tags[i]!r} is none of a span, and "
            f"nearly all others are ({len(strays):,} such tags); correct it to O, B-TYPE or I-TYPE"
        )
    for sentence in sentences:
        finder.add(sentence.tags)
    scheme = finder.scheme()
    if scheme == "plain":
        return Found(sentences=tuple(sentences), scheme=scheme, num_repaired=0, first_repaired=None)
    num_repaired, first = 0, None
    converted = []
    for sentence in sentences:
        broken = [] if scheme == "iob1" else broken_places(sentence.tags, scheme)
        if broken and first is None:
            place, what = broken[0]
            line = sentence.lines[min(place, len(sentence.lines) - 1)]
            first = f"{path}:{line}: {what}"
        num_repaired += len(broken)
        converted.append(sentence.with_tags(to_iob2(sentence.tags)))
    return Found(
        sentences=tuple(converted),
        scheme=scheme,
        num_repaired=num_repaired,
        first_repaired=first,
    )


def tag_names(found: Found) -> tuple[str, ...]:
    """Names of the model's outputs: O, then B and I of every type; or all plain tags in order."""
    tags = {tag for sentence in found.sentences for tag in sentence.tags}
    if not found.has_spans:
        return tuple(sorted(tags))
    kinds = sorted({tag.partition("-")[2] for tag in tags} - {""})
    return ("O", *(f"{position}-{kind}" for kind in kinds for position in "BI"))
