"""Counts and the words that go with them."""

import re

_SINGULAR = {
    "are": "is",
    "begin": "begins",
    "break": "breaks",
    "equal": "equals",
    "have": "has",
    "hold": "holds",
    "lack": "lacks",
    "look": "looks",
    "number": "numbers",
    "repeat": "repeats",
    "stand": "stands",
    "tell": "tells",
}

_OPENING = re.compile(
    r"(?P<noun>\w+(?: (?:to judge by(?: all)?|of documents|on a text|with their context))? )"
    rf"(?P<verb>{'|'.join(_SINGULAR)})\b"
)
"""What is counted and its verb. Only there is a verb looked for: behind it stand words of the
user's own, and verbs that belong to something else."""


def agreeing(what: str, count: int) -> str:
    """Words that follow "3 of 40", their verb in the singular after "1 of 40": "rows has no text".

    The noun stays as it is, for it belongs to the whole.
    """
    found = _OPENING.match(what) if count == 1 else None
    if found is None:
        return what
    return f"{found['noun']}{_SINGULAR[found['verb']]}{what[found.end() :]}"


def number_of(count: int, noun: str) -> str:
    """A count with its noun, given in the singular: 1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
