"""How long texts are: in tokens where a tokenizer is given, else in words."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from bertsmith.data.checkup.findings import PLACES_KEPT, Finding, Severity, Source
from bertsmith.data.checkup.tagged import plain_words
from bertsmith.data.tokenizer import word_bounds

HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
"""Characters that are each a word to BERT's pre-tokenizer."""

CUTS_TOKENS = (128, 256, 512)
PERCENTILES = (50, 90, 95, 99, 100)
ROWS_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 1 << 21
"""What the tokenizer gets in a call: bounds the memory of texts that wait."""

MANY_CUT_SHARE = 0.05
MANY_UNKNOWN_SHARE, MOSTLY_UNKNOWN_SHARE = 0.01, 0.2
"""Unknown tokens from which a tokenizer fits badly, and from which it is the wrong one."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of many texts, or pairs."""

    unit: str
    """tokens (special ones included) or words."""

    row: str
    """What has a length."""

    count: int
    percentiles: tuple[int, ...]
    """At `PERCENTILES`."""

    cuts: tuple[int, ...]
    """Lengths that models are limited to."""

    cut_shares: tuple[float, ...]
    """Of rows longer than each of these."""

    total: int
    """Of all texts together."""

    unknown: int | None
    """Tokens the vocabulary does not know; None for words."""

    @property
    def unknown_share(self) -> float | None:
        """Of all tokens."""
        return None if self.unknown is None else self.unknown / max(self.total, 1)

    def as_json(self) -> dict[str, Any]:
        """With the numbers they belong to."""
        return {
            "unit": self.unit,
            "total": self.total,
            "percentiles": {str(p): v for p, v in zip(PERCENTILES, self.percentiles, strict=True)},
            "share_over": {str(c): s for c, s in zip(self.cuts, self.cut_shares, strict=True)},
            "unknown_share": self.unknown_share,
        }

    def describe(self) -> str:
        """One line."""
        half, ninety, *_, longest = self.percentiles
        cuts = ", ".join(
            f"{s:.1%} over {c}" for c, s in zip(self.cuts, self.cut_shares, strict=True)
        )
        line = (
            f"{self.unit} in a {self.row}: half up to {half:,}, 90 % up to {ninety:,}, "
            f"longest {longest:,}; {cuts}"
        )
        share = self.unknown_share
        return line if share is None else f"{line}; {share:.2%} of tokens unknown"


class Ruler(Protocol):
    """Measures rows of one or two texts."""

    unit: str

    def measure(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
        """(length, unknown tokens) of each."""
        ...

    def words(self, text: str) -> list[tuple[int, int]]:
        """Where the words of a text stand, from and to."""
        ...


class WordRuler:
    """Counts words between blanks; a Chinese character is one, as in BERT."""

    unit = "words"

    def measure(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
        """(words, 0) of each."""
        return [(sum(map(_words, row)), 0) for row in rows]

    def words(self, text: str) -> list[tuple[int, int]]:
        """Runs of letters and digits, and signs: finer than what is counted, as tags need it."""
        return plain_words(text)


class TokenRuler:
    """Counts tokens, special ones included."""

    unit = "tokens"

    def __init__(self, tokenizer: Tokenizer, *, unk_id: int) -> None:
        self._tokenizer, self._unk_id = tokenizer, unk_id

    def measure(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
        """(tokens, unknown ones) of each."""
        inputs = [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows]
        encodings = self._tokenizer.encode_batch_fast(inputs)
        return [(len(e), e.ids.count(self._unk_id)) for e in encodings]

    def words(self, text: str) -> list[tuple[int, int]]:
        """As the tokenizer parts them, which is how words get their tags in training."""
        return word_bounds(self._tokenizer, text)


class LengthCheck:
    """Takes rows one by one; keeps a number and a line of each."""

    def __init__(
        self,
        ruler: Ruler,
        source: Source,
        *,
        cuts: tuple[int, ...] = CUTS_TOKENS,
        row: str = "row",
    ) -> None:
        self._ruler, self._source, self._cuts, self._row = ruler, source, cuts, row
        self._lengths, self._lines = array("q"), array("q")
        self._unknown = 0
        self._waiting: list[tuple[str, ...]] = []
        self._waiting_characters = 0

    def add(self, line: int, texts: tuple[str, ...]) -> None:
        """A row of one or two texts."""
        self._lines.append(line)
        self._waiting.append(texts)
        self._waiting_characters += sum(map(len, texts))
        if len(self._waiting) >= ROWS_AT_ONCE or self._waiting_characters >= CHARACTERS_AT_ONCE:
            self._measure()

    def _measure(self) -> None:
        for length, unknown in self._ruler.measure(self._waiting):
            self._lengths.append(length)
            self._unknown += unknown
        self._waiting, self._waiting_characters = [], 0

    def finish(self) -> Lengths | None:
        """What was measured; None of no rows."""
        self._measure()
        if not self._lengths:
            return None
        lengths_N = np.array(self._lengths, dtype=np.int64)
        percentiles = np.percentile(lengths_N, PERCENTILES, method="lower")
        return Lengths(
            unit=self._ruler.unit,
            row=self._row,
            count=len(lengths_N),
            percentiles=tuple(int(v) for v in percentiles),
            cuts=self._cuts,
            cut_shares=tuple(float(np.mean(lengths_N > cut)) for cut in self._cuts),
            total=int(lengths_N.sum()),
            unknown=self._unknown if isinstance(self._ruler, TokenRuler) else None,
        )

    def findings(self, *, unit: str = "rows") -> list[Finding]:
        """Rows that a model of 512 positions cuts, and a tokenizer that does not know the text."""
        lengths = self.finish()
        if lengths is None:
            return []
        lengths_N = np.array(self._lengths, dtype=np.int64)
        longest = self._cuts[-1]
        long_N = np.flatnonzero(lengths_N > longest)
        order = long_N[:PLACES_KEPT]
        found: list[Finding] = []
        if len(long_N):
            share = len(long_N) / len(lengths_N)
            found.append(
                Finding(
                    check="long_texts",
                    severity="warning" if share >= MANY_CUT_SHARE else "note",
                    what=f"{unit} are longer than {longest} {lengths.unit}",
                    count=len(long_N),
                    total=len(lengths_N),
                    places=tuple(self._source.at(self._lines[int(row)]) for row in order),
                    advice="What lies beyond a model's limit is cut off: shorten or split them.",
                )
            )
        share = lengths.unknown_share or 0.0
        if share >= MANY_UNKNOWN_SHARE:
            severity: Severity = "error" if share >= MOSTLY_UNKNOWN_SHARE else "warning"
            found.append(
                Finding(
                    check="unknown_tokens",
                    severity=severity,
                    what="tokens are unknown to the tokenizer",
                    count=lengths.unknown or 0,
                    total=lengths.total,
                    places=(),
                    advice="Take a model whose tokenizer knows this language and script.",
                )
            )
        return found


def _words(text: str) -> int:
    return len((text if text.isascii() else HAN.sub(" x ", text)).split())
