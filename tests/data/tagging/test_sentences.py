"""Tagged sentences are read in every form and scheme; what cannot be used is named by its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.config import TableConfig
from bertsmith.data.tagging.schemes import in_iob2, tag_names, to_iob2
from bertsmith.data.tagging.sentences import TaggedFile, form_of, read_tagged
from bertsmith.errors import UserError
from bertsmith.metrics.spans import Span, spans_of

IOB2 = ("B-A", "I-A", "B-A", "O", "B-B", "I-B", "I-B", "B-A")


def split(text: str) -> list[tuple[int, int]]:
    found, at = [], 0
    for word in text.split(" "):
        found.append((at, at + len(word)))
        at += len(word) + 1
    return found


def read(path: Path, *, skip: bool = False) -> TaggedFile:
    return read_tagged(path, TableConfig(bad_rows="skip" if skip else "error"), split=split)


def conll(path: Path, tags: tuple[str, ...]) -> Path:
    lines = "".join(f"w{i}\tx\t{tag}\n" for i, tag in enumerate(tags))
    path.write_text(f"-DOCSTART- -X- O\n\n{lines}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("iob2", IOB2),
        ("iob1", ("I-A", "I-A", "B-A", "O", "I-B", "I-B", "I-B", "I-A")),
        ("bioes", ("B-A", "E-A", "S-A", "O", "B-B", "I-B", "E-B", "S-A")),
        ("bioes", ("B-A", "L-A", "U-A", "O", "B-B", "I-B", "L-B", "U-A")),
    ],
)
def test_every_scheme_becomes_the_same_iob2(
    tmp_path: Path, scheme: str, tags: tuple[str, ...]
) -> None:
    file = read(conll(tmp_path / "a.conll", tags))
    found = in_iob2(file.sentences, path=file.path)
    assert found.scheme == scheme
    assert found.num_repaired == 0
    assert found.sentences[0].tags == IOB2
    assert tag_names(found) == ("O", "B-A", "I-A", "B-B", "I-B")


@given(st.lists(st.sampled_from(["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B"])))
def test_what_is_converted_is_valid_and_stays_as_it_is(tags: list[str]) -> None:
    once = to_iob2(tags)
    assert to_iob2(once) == once
    for before, tag in zip(("O", *once), once, strict=False):
        assert tag[0] != "I" or before in (f"B{tag[1:]}", tag)


def test_a_sequence_that_breaks_the_rules_is_repaired_counted_and_named(tmp_path: Path) -> None:
    file = read(conll(tmp_path / "a.conll", ("B-A", "O", "I-B", "B-A", "I-A", "B-A")))
    found = in_iob2(file.sentences, path=file.path)
    assert found.num_repaired == 1
    assert found.sentences[0].tags[2] == "B-B"
    assert f"{file.path}:5: I-B does not follow" in found.describe(file.path)[1]


def test_plain_tags_are_learned_as_they_are(tmp_path: Path) -> None:
    file = read(conll(tmp_path / "a.conll", ("NOUN", "VERB", "-LRB-")))
    found = in_iob2(file.sentences, path=file.path)
    assert not found.has_spans
    assert tag_names(found) == ("-LRB-", "NOUN", "VERB")


def test_a_stray_tag_among_those_of_spans_is_an_error(tmp_path: Path) -> None:
    file = read(conll(tmp_path / "a.conll", (*IOB2, *IOB2, "0")))
    with pytest.raises(UserError, match=r"a.conll:19: the tag '0' is none of a span"):
        in_iob2(file.sentences, path=file.path)


def rows(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    return path


def test_spans_of_characters_become_tags_of_words(tmp_path: Path) -> None:
    spans = [{"start": 0, "end": 9, "label": "PER"}, {"start": 14, "end": 17, "label": "LOC"}]
    path = rows(tmp_path / "a.jsonl", {"text": "Ada Byron saw London", "entities": spans})
    file = read(path)
    assert form_of(path, is_asked=False) == "texts and their spans"
    assert spans_of(file.sentences[0].tags) == [Span(0, 2, "PER"), Span(3, 4, "LOC")]
    assert file.num_widened == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "2 tokens and 1 tag;"),
        ({"text": "ab", "spans": [{"start": 1, "end": 5, "label": "A"}]}, "outside the text of 2"),
        (
            {
                "text": "ab cd",
                "spans": [
                    {"start": 0, "end": 4, "label": "A"},
                    {"start": 3, "end": 5, "label": "B"},
                ],
            },
            "overlap at 3",
        ),
        ({"text": "ab", "spans": [{"start": 0, "end": 2}]}, "needs start and end"),
        ({"text": " ", "spans": []}, "missing or empty"),
    ],
)
def test_a_bad_row_is_named_by_its_line_or_skipped_and_counted(
    tmp_path: Path, row: dict[str, object], said: str
) -> None:
    good = (
        {"tokens": ["a"], "tags": ["O"]}
        if "tokens" in row
        else {"text": "ab", "spans": [{"start": 0, "end": 2, "label": "A"}]}
    )
    path = rows(tmp_path / "a.jsonl", good, row)
    with pytest.raises(UserError, match=rf"a.jsonl:2: .*{said}"):
        read(path)
    file = read(path, skip=True)
    assert (len(file.sentences), file.skipped_rows) == (1, 1)


def test_a_file_without_sentences_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("\n\n")
    with pytest.raises(UserError, match="has no sentences"):
        read(tmp_path / "a.conll")
