"""Characters that tell of an accident on the way to the file."""

import re
from collections.abc import Callable

from bertsmith.data.checkup.findings import Finding, Severity, Tally

_AFTER = "".join(
    sorted(
        {bytes([b]).decode("windows-1252", "ignore") for b in range(0x80, 0xC0)}
        | {chr(b) for b in range(0x80, 0xC0)}
    )
)
"""What the second and later bytes of a UTF-8 character look like in Windows-1252 or Latin-1."""

MOJIBAKE = re.compile(
    "Ã[{after}]|Â[\xa0-\xbf]|â€[{after}]|ï»¿|ðŸ[{after}]"
    "|(?:[ÐÑ][{after}]){{2}}|(?:[ä-é][{after}]{{2}}){{2}}".format(after=re.escape(_AFTER))
)
"""UTF-8 once read as Windows-1252: accents, signs, curly quotes, a mark, emoji, Cyrillic, Chinese.
One letter before a quotation mark is no sign of it, so scripts of two bytes must show it twice."""

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

HALF_CHARACTER = re.compile("[\ud800-\udfff]")

MOJIBAKE_ERROR_SHARE = 0.2
"""From here on a model learns the accident."""


class CharacterCheck:
    """Looks at texts one by one."""

    def __init__(self) -> None:
        self._mojibake, self._replaced, self._control, self._marks, self._half = (
            Tally() for _ in range(5)
        )

    def look(self, text: str, place: Callable[[], str]) -> None:
        """Count what is odd in a text; `place` is asked only then."""
        if CONTROL.search(text):
            self._control.add(place())
        if text.isascii():
            return
        if found := MOJIBAKE.search(text):
            self._mojibake.add(place(), found.group())
        if "\ufffd" in text:
            self._replaced.add(place())
        if "\ufeff" in text:
            self._marks.add(place())
        if HALF_CHARACTER.search(text):
            self._half.add(place())

    def findings(self, total: int, *, unit: str = "rows") -> list[Finding]:
        """What was found among `total` rows, sentences or documents (`unit`)."""
        share = self._mojibake.count / max(total, 1)
        severity: Severity = "error" if share >= MOJIBAKE_ERROR_SHARE else "warning"
        return [
            *self._half.findings(
                "half_characters",
                "error",
                f"{unit} hold half a surrogate pair, which no tokenizer takes",
                total=total,
                advice="Repair the escapes (\\ud83d without its second half) or delete the rows.",
            ),
            *self._mojibake.findings(
                "mojibake",
                severity,
                f"{unit} look like UTF-8 that was once read as Latin-1 ({self._mojibake.example})",
                total=total,
                advice="Export the data again as UTF-8, or repair it with a tool such as ftfy.",
            ),
            *self._replaced.findings(
                "replacement_characters",
                "warning",
                f"{unit} hold U+FFFD, put there where a character was lost",
                total=total,
                advice="Export the data again from its source: what was there cannot be told.",
            ),
            *self._control.findings(
                "control_characters",
                "note",
                f"{unit} hold control characters",
                total=total,
                advice="BERT's tokenizers drop them; remove them if a byte of 0 means a bad copy.",
            ),
            *self._marks.findings(
                "inner_byte_order_marks",
                "note",
                f"{unit} hold a byte-order mark inside (files joined end to end?)",
                total=total,
                advice="Remove U+FEFF: it makes a text differ from its twin without it.",
            ),
        ]
