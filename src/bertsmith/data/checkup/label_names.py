"""Labels as a checkup sees them: what kind they are, and what is odd about their names and counts.

Pure functions of names and counts; where a label first stands comes with it.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from bertsmith.data.checkup.findings import PLACES_KEPT, Finding, Severity, shortened
from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.checkup.normal import normalised

LabelKind = Literal["classes", "scores", "lists"]
"""One of a set of names; numbers on a scale; several names a row."""

Place = Callable[[str], str]
"""Where a label first stands."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
SEPARATOR = re.compile(r"[,|;]")
WORD_ENDS = re.compile(r"[\W_]+")
MISSING_WORDS = frozenset({"nan", "null", "n/a", "#n/a", "<na>", "na", "none", "nil", "nat"})
"""How programs write a value that is not there (in lower case)."""

SURELY_MISSING = MISSING_WORDS - {"none", "na", "nil"}
"""Those that are hardly ever the name of a class."""

FEW_EXAMPLES = 10
TYPO_RATIO = 10
"""A name at least so many times rarer than one it resembles may be a slip."""

DOMINANT_SHARE = 0.9
UNEVEN_RATIO = 10
MOST_NAMES_COMPARED = 2000
FREE_TEXT_ROWS = 20
"""Below so many rows, many labels are no sign of free text (as in `data.labels`)."""


def label_kind(names: Collection[str]) -> LabelKind:
    """What labels with these names are, if they are not several a row.

    Scores: all are numbers, and not all whole.
    """
    if names and all(NUMBER.fullmatch(name) for name in names):
        return "classes" if all(_is_whole(name) for name in names) else "scores"
    return "classes"


def separator_in(counts: Mapping[str, int]) -> str | None:
    """The sign between the labels of a row, where training would find one."""
    if not any(SEPARATOR.search(name) for name in counts):
        return None
    from bertsmith.data.label_sets import find_separator  # noqa: PLC0415 - loads torch

    return find_separator(list(Counter(counts).elements()))


def parts_of(name: str, separator: str | None) -> list[str]:
    """The labels in one that lists several; None: with any of the usual signs between them."""
    split = SEPARATOR.split(name) if separator is None else name.split(separator)
    parts = (part.strip() for part in split)
    return list(dict.fromkeys(part for part in parts if part))


def missing_words(counts: Mapping[str, int], place: Place, *, total: int) -> list[Finding]:
    """Labels that are how a program writes a missing value."""
    return _of_names(
        "missing_value_labels",
        "warning",
        "rows have a label that is how programs write a missing value",
        [n for n in counts if n.lower() in SURELY_MISSING],
        counts,
        place,
        total=total,
        advice="Leave such rows out, or give the class another name: it is learned as one.",
    )


def mixed_numbers(counts: Mapping[str, int], place: Place, *, total: int) -> list[Finding]:
    """Numbers among words, or the other way round: two codings of one thing?"""
    numbers = [n for n in counts if NUMBER.fullmatch(n)]
    words = [n for n in counts if not NUMBER.fullmatch(n)]
    if not numbers or not words:
        return []
    return _of_names(
        "numbers_among_labels",
        "warning",
        "rows have a number for a label where others have a word, or a word among numbers",
        min(numbers, words, key=lambda names: sum(counts[n] for n in names)),
        counts,
        place,
        total=total,
        advice="Write every class in one way.",
    )


def typos(counts: Mapping[str, int], place: Place) -> list[Finding]:
    """Names that differ in case or punctuation, or a rare one by a letter from a frequent one.

    Numbers are taken as they are, and so are names that differ in their digits alone, or are made
    of words that come in other names too.
    """
    names = sorted(counts, key=lambda n: (-counts[n], n))
    if len(names) > MOST_NAMES_COMPARED:
        return []
    folded = {name: normalised(name).replace(" ", "") for name in names}
    names_with = Counter(word for name in names for word in set(_words(name)))
    slips: dict[str, str] = {}
    for i, rare in enumerate(names):
        if NUMBER.fullmatch(rare):
            continue
        is_composed = all(names_with[word] > 1 for word in _words(rare))
        for frequent in names[:i]:
            is_same = bool(folded[rare]) and folded[rare] == folded[frequent]
            is_rarer = counts[rare] * TYPO_RATIO <= counts[frequent]
            if is_same or (is_rarer and not is_composed and _is_slip(rare, frequent)):
                slips[rare] = frequent
                break
    if not slips:
        return []
    return [
        Finding(
            check="label_typos",
            severity="warning",
            what="labels look like slips of another: "
            + ", ".join(
                f"{shortened(rare)} ({number_of(counts[rare], 'row')}) of {shortened(frequent)} "
                f"({counts[frequent]:,})"
                for rare, frequent in list(slips.items())[:PLACES_KEPT]
            ),
            count=len(slips),
            total=len(names),
            places=tuple(place(name) for name in list(slips)[:PLACES_KEPT]),
            advice="Correct them, or each is learned as a class of its own.",
        )
    ]


def rare_labels(counts: Mapping[str, int], place: Place) -> list[Finding]:
    """Labels with one example, and those with few."""
    single = [n for n in counts if counts[n] == 1]
    few = [n for n in counts if 1 < counts[n] < FEW_EXAMPLES]
    return _labels(
        "single_example_labels",
        "warning",
        "labels have one example only",
        single,
        counts,
        place,
        advice="It cannot be both learned and judged: get more, join classes, or leave it out.",
    ) + _labels(
        "rare_labels",
        "note",
        f"labels have fewer than {FEW_EXAMPLES} examples",
        few,
        counts,
        place,
        advice="Expect low scores for them: get more examples, or join classes.",
    )


def balance(counts: Mapping[str, int], place: Place, *, total: int) -> list[Finding]:
    """One class only, one that is nearly all, or very uneven ones."""
    if not counts:
        return []
    largest = max(counts, key=lambda n: counts[n])
    if len(counts) == 1:
        return _of_names(
            "one_class",
            "error",
            f"rows all have the one label {shortened(largest)}",
            [largest],
            counts,
            place,
            total=total,
            advice="A classifier needs two: is this the label column (--label_column)?",
        )
    if counts[largest] > DOMINANT_SHARE * total:
        return _of_names(
            "dominant_label",
            "warning",
            f"rows have the label {shortened(largest)}: answering it always scores as much",
            [largest],
            counts,
            place,
            total=total,
            advice="Judge by macro-F1 or MCC, not by accuracy (--monitor macro_f1).",
        )
    rare = [n for n in counts if FEW_EXAMPLES <= counts[n] <= counts[largest] // UNEVEN_RATIO]
    return _labels(
        "uneven_labels",
        "note",
        f"labels have less than a tenth of the rows of {shortened(largest)} ({counts[largest]:,})",
        rare,
        counts,
        place,
        advice="Judge by macro-F1, which counts every class alike (--monitor macro_f1).",
    )


def free_text(counts: Mapping[str, int], place: Place, *, total: int) -> list[Finding]:
    """Nearly a label of its own for each row."""
    if total < FREE_TEXT_ROWS or len(counts) <= total // 2:
        return []
    return _labels(
        "labels_are_free_text",
        "error",
        f"different labels stand in {total:,} rows",
        list(counts),
        counts,
        place,
        advice="Is this the label column? Name it with --label_column.",
    )


def unseen(
    train: Mapping[str, int], dev: Mapping[str, int], place: Place, *, total: int
) -> list[Finding]:
    """Labels to judge by that are never learned, and a dev set of one class."""
    found = _of_names(
        "unseen_labels",
        "error",
        "rows to judge by have a label that training never sees",
        [name for name in dev if name not in train],
        dev,
        place,
        total=total,
        advice="Correct the label, add examples of it for training, or take the rows out.",
    )
    if len(dev) == 1 and len(train) > 1:
        found += _of_names(
            "one_class_to_judge_by",
            "error",
            f"rows to judge by all have the one label {shortened(next(iter(dev)))}",
            list(dev),
            dev,
            place,
            total=total,
            advice="Hold out rows of every class: was a sorted file cut in two?",
        )
    return found


def is_near(one: str, other: str, *, most: int) -> bool:
    """Whether at most so many letters inserted, deleted, changed or swapped make one the other.

    Source:
        Damerau 1964 (each pair of neighbours swapped at most once: optimal string alignment).
    """
    if abs(len(one) - len(other)) > most:
        return False
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            best = min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        if min(row) > most:
            return False
        before, above = above, row
    return above[-1] <= most


def _is_slip(rare: str, frequent: str) -> bool:
    length = min(len(rare), len(frequent))
    if length < 4 or _without_digits(rare) == _without_digits(frequent):
        return False
    return is_near(rare.lower(), frequent.lower(), most=2 if length >= 10 else 1)


def _words(name: str) -> list[str]:
    return [word for word in WORD_ENDS.split(name.lower()) if word]


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _is_whole(name: str) -> bool:
    return name.lstrip("+-").isdecimal()


def _named(names: Sequence[str], counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{shortened(n)} ({counts[n]:,})" for n in names[:PLACES_KEPT])
    return f": {shown}" + (", ..." if len(names) > PLACES_KEPT else "")


def _labels(
    check: str,
    severity: Severity,
    what: str,
    names: Sequence[str],
    counts: Mapping[str, int],
    place: Place,
    *,
    advice: str,
) -> list[Finding]:
    """A finding that counts labels."""
    if not names:
        return []
    return [
        Finding(
            check=check,
            severity=severity,
            what=what + _named(names, counts),
            count=len(names),
            total=len(counts),
            places=tuple(place(name) for name in names[:PLACES_KEPT]),
            advice=advice,
        )
    ]


def _of_names(
    check: str,
    severity: Severity,
    what: str,
    names: Sequence[str],
    counts: Mapping[str, int],
    place: Place,
    *,
    total: int,
    advice: str,
) -> list[Finding]:
    """A finding that counts the rows of some labels."""
    if not names:
        return []
    return [
        Finding(
            check=check,
            severity=severity,
            what=what + ("" if shortened(names[0]) in what else _named(names, counts)),
            count=sum(counts[name] for name in names),
            total=total,
            places=tuple(place(name) for name in names[:PLACES_KEPT]),
            advice=advice,
        )
    ]
