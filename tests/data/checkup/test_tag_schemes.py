"""Tag sequences: the scheme is found, and its rules are held."""

import pytest

from bertsmith.data.checkup.tag_schemes import Scheme, SchemeFinder, broken_places


def scheme_of(*sentences: str) -> Scheme:
    finder = SchemeFinder()
    for sentence in sentences:
        finder.add(sentence.split())
    return finder.scheme()


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-PER I-PER O B-LOC"], "iob2"),
        (["O I-PER I-PER O I-LOC", "I-PER B-PER I-PER"], "iob1"),  # Ramshaw and Marcus
        (["I-PER O I-LOC I-LOC"], "io"),
        (["B-PER E-PER O S-LOC"], "bioes"),
        (["B-PER M-PER E-PER S-LOC"], "bioes"),  # BMES
        (["B-PER I-PER L-PER U-LOC"], "bioes"),  # BILOU
        (["NOUN VERB O"], "plain"),
        (["X-ray NOUN"], "plain"),
        (["O O"], "plain"),
        (["B-PER O I-LOC"], "iob2"),  # with a mistake
    ],
)
def test_the_scheme_is_found(sentences: list[str], scheme: Scheme) -> None:
    assert scheme_of(*sentences) == scheme


@pytest.mark.parametrize(
    ("tags", "scheme", "places"),
    [
        ("B-PER I-PER O B-PER B-PER", "iob2", []),
        ("O I-PER I-PER", "iob2", [1]),
        ("B-PER I-LOC", "iob2", [1]),
        ("I-PER", "iob2", [0]),
        ("I-PER B-PER", "iob1", []),
        ("O B-PER", "iob1", [1]),
        ("B-PER E-PER S-PER O B-X I-X E-X", "bioes", []),
        ("B-PER O", "bioes", [0]),  # never ended
        ("O E-PER", "bioes", [1]),
        ("B-PER I-PER", "bioes", [1]),  # never ended at the end of the sentence
        ("M-PER E-PER", "bioes", [0]),
        ("NOUN VERB", "plain", []),
    ],
)
def test_broken_rules_are_placed(tags: str, scheme: Scheme, places: list[int]) -> None:
    assert [place for place, _ in broken_places(tags.split(), scheme)] == places
