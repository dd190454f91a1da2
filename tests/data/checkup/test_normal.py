"""What counts as the same text."""

import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.checkup.normal import digest_of, normalised

WORDS = st.lists(st.text(string.ascii_letters + string.digits, min_size=1), min_size=1)
BETWEEN = st.text(string.punctuation.translate(str.maketrans("", "", "$+<=>^`|~")) + " \t\n")


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(WORDS, st.data())
def test_case_blanks_and_punctuation_between_words_do_not_count(
    words: list[str], data: st.DataObject
) -> None:
    gaps = [data.draw(BETWEEN) + " " for _ in words]
    dressed = "".join(
        gap + (word.upper() if data.draw(st.booleans()) else word)
        for gap, word in zip(gaps, words, strict=True)
    )
    assert normalised(dressed + data.draw(BETWEEN)) == " ".join(words).lower()


@given(st.text())
def test_composed_and_decomposed_texts_are_the_same(text: str) -> None:
    assert normalised(unicodedata.normalize("NFD", text)) == normalised(text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("\uff28\uff45\uff4c\uff4c\uff4f\uff0c\u3000\uff37\uff01", "hello w"),  # full width
        ("STRASSE", "straße"),
        ("ﬁne", "fine"),  # a ligature
        ("这 很好。", "这 很好"),
        ("no\u200bbreak", "nobreak"),
        ("«Bonjour»", "bonjour"),
    ],
)
def test_the_same_but_for_its_dress(text: str, same: str) -> None:
    assert normalised(text) == normalised(same)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("!!!", "???"),  # nothing but punctuation keeps it
        ("C++", "C"),  # signs are no punctuation
        ("क", "कि"),  # a vowel sign of Hindi is a letter
        ("good film", "goodfilm"),
    ],
)
def test_different_all_the_same(text: str, other: str) -> None:
    assert normalised(text) != normalised(other)


def test_a_pair_is_not_its_texts_joined() -> None:
    assert digest_of("a b", "c") != digest_of("a", "b c")
    assert digest_of("a") == digest_of("a")
    assert digest_of("\ud83d") != digest_of("\ud83e")  # halves of pairs have digests too
