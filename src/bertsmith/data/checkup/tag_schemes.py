"""Ways to write spans as tags, and where a sequence of tags breaks its way's rules.

Source:
    Ramshaw and Marcus 1995 (IOB1); Tjong Kim Sang and Veenstra 1999 (IOB2, IOE); Ratinov and Roth
    2009 (BILOU).
"""

from collections.abc import Iterable, Sequence
from typing import Literal

Scheme = Literal["plain", "io", "iob1", "iob2", "bioes"]

SCHEMES_WITH_RULES: tuple[Scheme, ...] = ("iob1", "iob2", "bioes")
"""Those that a sequence can break."""

_SAME = {"M": "I", "L": "E", "U": "S"}
"""BMES and BILOU write the same as BIOES in other letters."""


def split_tag(tag: str) -> tuple[str, str]:
    """(B, I, E, S or O, type) of a tag; ("", tag) of one that is no part of a span."""
    if tag == "O":
        return "O", ""
    position, dash, kind = tag.partition("-")
    if not dash or not kind or position not in tuple("BIESMLU"):
        return "", tag
    return _SAME.get(position, position), kind


class SchemeFinder:
    """Which scheme all sentences together are written in."""

    def __init__(self) -> None:
        self._positions: set[str] = set()
        self._starts_with_b = self._needless_b = self._starts_with_i = 0

    def add(self, tags: Iterable[str]) -> None:
        """A sentence."""
        before = ("O", "")
        for tag in tags:
            now = split_tag(tag)
            self._positions.add(now[0])
            if now[0] == "B":
                self._starts_with_b += 1
                self._needless_b += before[1] != now[1]
            elif now[0] == "I":
                self._starts_with_i += before[1] != now[1]
            before = now

    def scheme(self) -> Scheme:
        """IOB1 writes B only between two neighbours of a type; elsewhere I begins a span."""
        if "" in self._positions or self._positions <= {"O"}:
            return "plain"
        if self._positions & {"E", "S"}:
            return "bioes"
        if "B" not in self._positions:
            return "io"
        if self._starts_with_i and not self._needless_b:
            return "iob1"
        return "iob2"


def broken_places(tags: Sequence[str], scheme: Scheme) -> list[tuple[int, str]]:
    """(index, what is wrong) where a sequence breaks the scheme's rules."""
    if scheme not in SCHEMES_WITH_RULES:
        return []
    found: list[tuple[int, str]] = []
    before, kind_before = "O", ""
    for i, tag in enumerate([*tags, "O"]):
        position, kind = split_tag(tag)
        goes_on = position in ("I", "E")
        is_inside = before in ("B", "I") and kind_before == kind
        if scheme == "iob2" and goes_on and not is_inside:
            found.append((i, f"{tag} does not follow B-{kind} or I-{kind}"))
        elif scheme == "iob1" and position == "B" and not (before in ("B", "I") and is_inside):
            found.append((i, f"{tag} does not part two neighbours"))
        elif scheme == "bioes":
            if goes_on and not is_inside:
                found.append((i, f"{tag} goes on with nothing"))
            elif before in ("B", "I") and not (goes_on and is_inside):
                found.append((max(i - 1, 0), f"{tags[i - 1]} is never ended"))
        before, kind_before = position, kind
    return found
