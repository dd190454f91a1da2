"""Labels: kinds, slips, rare ones, by small counts made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.checkup import label_names
from bertsmith.data.checkup.label_names import (
    LabelKind,
    is_near,
    label_kind,
    parts_of,
    separator_in,
)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["pos", "neg"], "classes"),
        (["0", "1", "2"], "classes"),
        (["0.5", "1", "2"], "scores"),
        (["-1e-3", "2"], "scores"),
        (["Washington, D.C.", "Paris", "Rome"], "classes"),
        (["1", "two"], "classes"),
    ],
)
def test_names_tell_the_kind(names: list[str], kind: LabelKind) -> None:
    assert label_kind(names) == kind


@pytest.mark.parametrize(
    ("counts", "separator"),
    [
        ({"joy": 3, "anger": 2, "joy,anger": 1}, ","),
        ({"a, x|b": 1, "b": 2, "a, x": 1}, "|"),
        ({"Washington, D.C.": 5, "Paris": 5, "Rome": 5}, None),
        ({"joy": 3, "anger": 2}, None),
    ],
)
def test_signs_between_labels_are_those_that_training_finds(
    counts: dict[str, int], separator: str | None
) -> None:
    assert separator_in(counts) == separator


def test_labels_of_a_row_are_parted_at_the_sign() -> None:
    assert parts_of("a, x|b", "|") == ["a, x", "b"]
    assert parts_of("a, x|b", None) == ["a", "x", "b"]


@pytest.mark.parametrize(
    ("counts", "slips"),
    [
        ({"positive": 100, "negative": 90, "postive": 2}, ["postive"]),
        ({"positive": 100, "negative": 90, "psoitive": 1}, ["psoitive"]),  # neighbours swapped
        ({"Positive": 50, "positive": 50, "negative": 90}, ["positive"]),  # case, equally often
        ({"card arrival": 50, "card_arrival": 1, "other": 9}, ["card_arrival"]),
        ({"positive": 100, "negative": 90, "postive": 20}, []),  # too many to be a slip
        ({"class_1": 100, "class_2": 3}, []),  # a number tells them apart
        ({"0": 100, "1": 2}, []),
        ({"cat": 100, "car": 1}, []),  # too short to say
        ({"PER.NAM": 500, "PER.NOM": 500, "ORG.NAM": 400, "ORG.NOM": 8}, []),  # made of known words
        ({"entailment": 100, "not_entailment": 4}, []),
    ],
)
def test_slips_of_a_label(counts: dict[str, int], slips: list[str]) -> None:
    found = label_names.typos(counts, lambda name: name)
    assert [list(finding.places) for finding in found] == ([slips] if slips else [])


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_nearness_is_that_of_the_textbook(one: str, other: str) -> None:
    """Against the definition, without its short cuts."""

    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        best = min(
            distance(i - 1, j) + 1,
            distance(i, j - 1) + 1,
            distance(i - 1, j - 1) + (one[i - 1] != other[j - 1]),
        )
        if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
            best = min(best, distance(i - 2, j - 2) + 1)
        return best

    for most in (0, 1, 2):
        assert is_near(one, other, most=most) == (distance(len(one), len(other)) <= most)
