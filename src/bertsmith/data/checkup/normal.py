"""When two texts count as the same: whatever case, width, white space or punctuation they have."""

import hashlib
import unicodedata


class _Folding(dict[int, str | None]):
    """What becomes of a character, found once for each.

    White space, punctuation and control characters separate words; invisible format characters
    vanish, except the two joiners that some scripts spell with; all else stays.
    """

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        category = unicodedata.category(character)
        folded: str | None = character
        if character in "\u200c\u200d":
            folded = character
        elif category == "Cf":
            folded = None
        elif category[0] in "PZ" or category == "Cc":
            folded = " "
        self[code] = folded
        return folded


_FOLDING = _Folding()


def normalised(text: str) -> str:
    """The text in NFKC, case folded, every run of white space and punctuation one blank.

    A text of nothing else keeps its characters: "!!!" and "???" are not the same. Applying it again
    changes nothing.

    Source:
        Unicode Standard Annex 15 (NFKC); chapter 3.13, "Default caseless matching".
    """
    folded = text
    while (again := _folded_once(folded)) != folded:
        folded = again
    return folded or " ".join(text.split())


def _folded_once(text: str) -> str:
    if text.isascii():
        folded = text.lower()
    else:
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.translate(_FOLDING).split())


def digest_of(*parts: str) -> int:
    """64 bits of a row's texts; two different rows of 10^8 share them with a chance of 3 in 10^4.

    Half a surrogate pair, which UTF-8 has no bytes for, counts like any other character.
    """
    joined = "\x1f".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
