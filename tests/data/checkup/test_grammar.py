"""Words agree with the count before them, and nothing but the first verb is touched."""

import pytest

from bertsmith.data.checkup.grammar import agreeing, number_of


@pytest.mark.parametrize(
    ("what", "singular"),
    [
        ("rows have no text", "rows has no text"),
        ("lines hold bytes that are not UTF-8", "lines holds bytes that are not UTF-8"),
        (
            "rows to judge by stand among those to learn from",
            "rows to judge by stands among those to learn from",
        ),
        (
            "rows to judge by all have the one label 'a'",
            "rows to judge by all has the one label 'a'",
        ),
        ("rows cannot be read (the first: they have none)", None),
        ("file begins with a mark", None),
        ("columns number the rows", "columns numbers the rows"),
    ],
)
def test_the_verb_of_one(what: str, singular: str | None) -> None:
    assert agreeing(what, 1) == (singular or what)
    assert agreeing(what, 2) == what
    assert agreeing(agreeing(what, 1), 1) == (singular or what)


def test_counts_with_their_noun() -> None:
    assert [number_of(n, "row") for n in (0, 1, 2, 1200)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,200 rows",
    ]
