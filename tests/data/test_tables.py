"""Tables: every row is read as it stands, or named with its place."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.config import TableConfig
from bertsmith.data.labels import label_ids, label_names, stratified_holdout
from bertsmith.data.tables import Table, TableReader, read_table
from bertsmith.errors import UserError

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def read(path: Path, **settings: object) -> Table:
    return read_table(path, TableConfig(**settings))  # type: ignore[arg-type]


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        label_names(read(path, **settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_csv_field_may_hold_quotes_separators_and_newlines(write: Write) -> None:
    path = write("a.csv", 'text,label\r\n"one, ""two""\nthree",x\r\nfour,y\r\n')
    table = read(path)
    assert table.texts == ('one, "two"\nthree', "four")
    assert table.labels == ("x", "y")
    assert table.place(1) == f"{path}:4 (row 2)"


def test_in_tsv_a_quote_is_an_ordinary_character(write: Write) -> None:
    content = 'text\tlabel\n"It opens and never closes\tx\nnext\ty\n"whole"\tx\n'
    assert read(write("a.tsv", content)).texts == ('"It opens and never closes', "next", '"whole"')


def test_in_tsv_quotes_open_a_field_when_told(write: Write) -> None:
    path = write("a.tsv", 'text\tlabel\n"a\tb\nc"\tx\nd\ty\n')
    assert read(path, quoting="standard").texts == ("a\tb\nc", "d")


def test_a_quote_that_is_never_closed_is_an_error_not_a_short_table(write: Write) -> None:
    path = write("a.csv", 'text,label\nfine,x\n"opens,x\nlost,y\nlost too,x\n')
    assert refusal(path).startswith(f"{path}:3: a quote is opened here and never closed")


@pytest.mark.parametrize("text", ["null", "NA", "None", "nan", "N/A", "true", "007"])
def test_nothing_is_taken_for_a_missing_value(write: Write, text: str) -> None:
    table = read(write("a.csv", f"text,label\n{text},x\nb,{text}\n"))
    assert table.texts == (text, "b")
    assert table.labels == ("x", text)


def test_a_byte_order_mark_and_crlf_leave_no_trace(write: Write) -> None:
    table = read(write("a.tsv", b"\xef\xbb\xbftext\tlabel\r\na\tx\r\nb\ty\r\n"))
    assert table.columns.names == ("text", "label")
    assert table.labels == ("x", "y")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'\xef\xbb\xbftext,label\r"a\rb",x\rc\xc3\xa9,y'),
        ("a.tsv", b"text\tlabel\ra\tx\rc\xc3\xa9\ty\r"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\r{"text": "c\xc3\xa9", "label": "y"}\r'),
    ],
)
def test_a_file_whose_lines_all_end_in_cr_is_read(write: Write, name: str, content: bytes) -> None:
    path = write(name, content)
    table = read(path)
    assert table.texts == ("a\rb" if name == "a.csv" else "a", "c\u00e9")
    assert table.labels == ("x", "y")
    assert "byte" in refusal(write("bad.csv", b"text,label\ra,x\rc\xe9,y\r"))


def test_in_tsv_a_cr_inside_a_line_is_text(write: Write) -> None:
    assert read(write("a.tsv", "text\tlabel\na\rb\tx\nc\ty\n")).texts == ("a\rb", "c")


def test_every_format_and_compression_gives_the_same_table(write: Write, tmp_path: Path) -> None:
    texts, labels = ["eins, zwei", "drei", "\u4e2d\u6587"], ["x", "y", "x"]
    rows = list(zip(texts, labels, strict=True))
    lines = "".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in rows)
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels}), parquet)
    plain: dict[str, str | bytes] = {
        "a.csv": "text,label\n" + "".join(f'"{a}",{b}\n' for a, b in rows),
        "a.tsv": "text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows),
        "a.jsonl": lines,
        "a.parquet": parquet.read_bytes(),
    }
    for name, content in plain.items():
        data = content if isinstance(content, bytes) else content.encode()
        half = len(data) // 2
        frames = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
        paths = [
            write(name, data),
            write(name + ".gz", gzip.compress(data)),
            write(name + ".zst", frames),
        ]
        for path in paths:
            table = read(path)
            assert (list(table.texts), list(table.labels)) == (texts, labels), path


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_cut_off_archive_is_an_error(write: Write, ending: str) -> None:
    content = "text,label\n" + "".join(f"text {i * i},{i % 2}\n" for i in range(50_000))
    pack = gzip.compress if ending == ".gz" else zstandard.compress
    path = write("a.csv" + ending, pack(content.encode())[:-20])
    assert "cut off" in refusal(path)


def test_an_ending_that_lies_is_an_error(write: Write) -> None:
    assert "is not compressed that way" in refusal(write("a.csv.gz", "text,label\na,x\n"))


def test_labels_meet_whatever_type_their_file_gives_them(write: Write) -> None:
    values = ["1", "1.0", 1, 1.0, " 1 ", True, "0"]
    lines = "".join(json.dumps({"text": "a", "label": v}) + "\n" for v in values)
    assert read(write("a.jsonl", lines)).labels == ("1", "1", "1", "1", "1", "true", "0")


def test_label_names_sort_by_value_when_all_are_numbers(write: Write) -> None:
    numbers = write("a.csv", "text,label\na,10\nb,9\nc,-1\n")
    assert label_names(read(numbers)) == ("-1", "9", "10")
    words = write("b.csv", "text,label\na,10\nb,9\nc,x\n")
    assert label_names(read(words)) == ("10", "9", "x")


@pytest.mark.parametrize(
    ("header", "text", "pair", "label"),
    [
        ("text,label", "text", None, "label"),
        ("Sentence,Labels", "Sentence", None, "Labels"),
        ("id,review,sentiment", "review", None, "sentiment"),
        ("label,sentence1,sentence2", "sentence1", "sentence2", "label"),
        ("premise,hypothesis,label", "premise", "hypothesis", "label"),
        ("text,text_b,class", "text", "text_b", "class"),
        ("utterance,intent", "utterance", None, "intent"),
        ("text,content,label,category", "text", None, "label"),
    ],
)
def test_columns_are_found_by_name(
    write: Write, header: str, text: str, pair: str | None, label: str
) -> None:
    row = ",".join(f"v{i}" for i in range(header.count(",") + 1))
    path = write("a.csv", f"{header}\n{row}\n")
    with TableReader(path, TableConfig(), is_labelled=True) as reader:
        columns = reader.columns
    assert (columns.text_name, columns.pair_name) == (text, pair)
    assert columns.label is not None
    assert columns.names[columns.label] == label


def test_named_columns_win(write: Write) -> None:
    path = write("a.csv", "text,text_b,label,tone\na,b,x,p\nc,d,y,q\n")
    table = read(path, text_column="text_b", label_column="tone")
    assert (table.texts, table.pairs, table.labels) == (("b", "d"), None, ("p", "q"))


def test_a_table_without_a_header_line_is_read_when_its_columns_are_named(write: Write) -> None:
    path = write("a.tsv", "1\tgood\n0\tbad\n")
    assert "--table.columns" in refusal(path)
    table = read(path, columns=["label", "text"])
    assert (table.texts, table.labels) == (("good", "bad"), ("1", "0"))
    assert table.place(0) == f"{path}:1 (row 1)"


@pytest.mark.parametrize(
    ("name", "content", "place", "says"),
    [
        ("a.csv", "", "", "the file is empty"),
        ("a.jsonl", "", "", "the file is empty"),
        ("a.csv", "text,label\n", "", "no rows"),
        ("a.csv", "id,label\n1,x\n", "", "no text column found"),
        ("a.csv", "text,id\na,1\n", "", "no label column found"),
        ("a.csv", "text,text_b\na,b\n", "", "on pairs that have none with --task embedding"),
        ("a.csv", "review,content,label\na,b,x\n", "", "'review', 'content'"),
        ("a.csv", "text,text,label\na,b,x\n", ":1", "stands twice"),
        ("a.csv", "text;label\na;x\n", ":1", "not separated by commas"),
        ("a.csv", "text,label\na,x\nb\n", ":3 (row 2)", "1 fields where the header has 2"),
        ("a.csv", "text,label\na,b,x\n", ":2 (row 1)", "3 fields where the header has 2"),
        ("a.csv", "text,label\na,x\n  ,y\n", ":3 (row 2)", "the text is empty"),
        ("a.csv", "text,label\na,x\nb, \n", ":3 (row 2)", "the label is empty"),
        ("a.csv", 'text,label\n"a"b,x\n', ":2 (row 1)", "not valid CSV"),
        ("a.csv", '"text"x,label\na,x\n', ":1", "not valid CSV"),
        ("a.csv", "text,label\ra,x\nb,y\n", ":1", "not valid CSV"),
        ("a.tsv", b"text\tlabel\na\tx\nc\xe9\ty\n", ":3 (row 2)", "byte 16 of the file"),
        ("a.csv", b'text,label\na,x\n"b\nc\xe9",y\n', ":3 (row 2)", "byte 19 of the file"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b', ":2 (row 2)", "not valid JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', ":2 (row 2)", "not a JSON object"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', ":2", "the label is missing"),
        ("a.jsonl", '{"text": "a", "label": null}\n', ":1 (row 1)", "the label is missing"),
        ("a.jsonl", '{"text": "a\\ud83d", "label": 1}\n', ":1 (row 1)", "surrogate"),
        ("a.jsonl", '{"text": "a", "label": "\\ud83d"}\n', ":1 (row 1)", "the label holds half"),
        ("a.jsonl", '{"text": 7, "label": 1}\n', ":1 (row 1)", "the text is a int"),
        ("a.jsonl", '{"text": "a", "label": ["p"]}\n', ":1 (row 1)", "the label is a list"),
        ("a.csv", "text,label\na,x\nb,x\n", "", "every row has the label 'x'"),
        ("a.txt", "text\n", "", "is no table's"),
        ("a.parquet", "PAR1 but not really", "", "not a readable Parquet file"),
        ("a.csv", b"\xff\xfet\x00e\x00x\x00t\x00", "", "UTF-16"),
    ],
)
def test_bad_input_is_named_with_its_place(
    write: Write, name: str, content: str | bytes, place: str, says: str
) -> None:
    path = write(name, content)
    message = refusal(path)
    assert message.startswith(f"{path}{place}")
    assert says in message


def test_a_mistyped_column_is_answered_with_the_nearest(write: Write) -> None:
    path = write("a.csv", "headline,label\na,x\n")
    assert "did you mean 'headline'?" in refusal(path, text_column="hedline")


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent.csv")


def test_bad_rows_are_skipped_and_counted_when_told(write: Write) -> None:
    content = b'text,label\na,x\n,y\nb\nc\xe9,x\n"d"d,x\ne,y\n'
    table = read(write("a.csv", content), bad_rows="skip")
    assert table.texts == ("a", "e")
    assert table.rows == (1, 6)
    assert table.skipped_rows == 4
    assert "row 2" in (table.first_skipped or "")


def test_blank_lines_are_no_rows_but_an_empty_text_in_a_table_of_one_column(write: Write) -> None:
    assert read(write("a.csv", "text,label\n\na,x\n\nb,y\n\n")).rows == (1, 2)
    path = write("b.csv", "text\na\n\nb\n\n")
    with TableReader(path, TableConfig(bad_rows="skip"), is_labelled=False) as reader:
        assert [(r.row, r.text) for r in reader] == [(1, "a"), (3, "b")]
    assert reader.skipped_rows == 1


def test_other_columns_are_carried_where_asked(write: Write) -> None:
    path = write("a.jsonl", '{"id": 1, "text": "a"}\n{"text": "b", "more": [2]}\n')
    with TableReader(path, TableConfig(), is_labelled=False, keeps_columns=True) as reader:
        assert reader.columns.names == ("id", "text", "more")
        assert [r.values for r in reader] == [(1, "a", None), (None, "b", [2])]


@pytest.mark.parametrize("value", ['"\\udc00"', '["x", "\\ud83d"]', '{"\\ud83d": 1}'])
def test_a_carried_value_that_utf8_cannot_write_is_refused_with_its_row(
    write: Write, value: str
) -> None:
    path = write(
        "a.jsonl", f'{{"text": "a", "more": "\\ud83d\\ude00"}}\n{{"text": "b", "more": {value}}}\n'
    )
    with TableReader(path, TableConfig(), is_labelled=False, keeps_columns=True) as reader:
        rows = iter(reader)
        assert next(rows).values == ("a", "\U0001f600")
        with pytest.raises(UserError, match=r"a\.jsonl:2 \(row 2\): .*surrogate.*'more'"):
            next(rows)
    with TableReader(path, TableConfig(), is_labelled=False) as reader:
        assert len(list(reader)) == 2  # nothing is written of it
    named = write("b.jsonl", '{"text": "a", "\\ud83d": 1}\n')
    with pytest.raises(UserError, match="the name of column"):
        TableReader(named, TableConfig(), is_labelled=False, keeps_columns=True)


def test_a_pair_model_needs_the_second_text(write: Write) -> None:
    path = write("a.csv", "text,label\na,x\n")
    with pytest.raises(UserError, match="pairs of texts are needed"):
        TableReader(path, TableConfig(), is_labelled=True, is_pair=True)


def test_a_label_seen_only_in_dev_is_named_with_its_row(write: Write) -> None:
    train = read(write("train.csv", "text,label\na,x\nb,y\n"))
    dev = read(write("dev.csv", "text,label\na,y\nb,z\nc,z\n"))
    names = label_names(train)
    assert label_ids(train, names, known_from="train.csv").tolist() == [0, 1]
    with pytest.raises(UserError, match=r"dev.csv:3 \(row 2\) \(and 1 more rows\): the label 'z'"):
        label_ids(dev, names, known_from="train.csv")


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    share=st.floats(0.02, 0.6),
    seed=st.integers(0, 1000),
)
def test_a_holdout_is_a_partition_in_proportion_that_leaves_every_label_to_training(
    counts: list[int], share: float, seed: int
) -> None:
    labels = [f"c{i}" for i, n in enumerate(counts) for _ in range(n)]
    if max(counts) == 1:
        with pytest.raises(UserError, match="no row can be held out"):
            stratified_holdout(labels, share=share, seed=seed)
        return
    train, held = stratified_holdout(labels, share=share, seed=seed)
    assert sorted(train + held) == list(range(len(labels)))
    assert {labels[i] for i in train} == set(labels)
    for i, n in enumerate(counts):
        assert abs(sum(labels[j] == f"c{i}" for j in held) - share * n) < 1 + 1e-9 or n < 1 / share
    assert (train, held) == stratified_holdout(labels, share=share, seed=seed)


def test_a_holdout_has_the_size_asked_for_and_follows_the_seed() -> None:
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 20
    _, held = stratified_holdout(labels, share=0.1, seed=0)
    assert [sum(labels[i] == n for i in held) for n in "abc"] == [5, 3, 2]
    assert held != stratified_holdout(labels, share=0.1, seed=1)[1]
