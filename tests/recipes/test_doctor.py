"""`doctor` finds each kind of problem, with its line, and is silent on clean files."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bertsmith.cli import run
from bertsmith.data.checkup.tagged import plain_words
from bertsmith.data.config import TableConfig
from bertsmith.data.tagging.sentences import read_tagged
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.texts.tables import read_task_tables

Doctor = Callable[..., dict[str, Any]]

CLEAN = [(f"the film number {i} was a joy to see", "good") for i in range(12)] + [
    (f"nobody should sit through part {i} again", "bad") for i in range(12)
]


def csv_of(rows: Sequence[tuple[str, ...]], header: str = "text,label") -> bytes:
    return "\n".join([header, *(",".join(row) for row in rows), ""]).encode()


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Writes content into a file (or files), runs doctor on it, and gives its JSON.

    The findings come by their check; the exit code is checked against them.
    """

    def look(
        content: bytes | str, *options: str, name: str = "a.csv", dev: bytes | str | None = None
    ) -> dict[str, Any]:
        path, eval_path = tmp_path / name, tmp_path / f"dev-{name}"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        words = [str(path), *options, "--json"]
        if dev is not None:
            eval_path.write_bytes(dev.encode() if isinstance(dev, str) else dev)
            words += ["--eval", str(eval_path)]
        capsys.readouterr()
        code = run(["doctor", *words])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        is_fit = all(f["severity"] != "error" for f in told["findings"])
        assert code == (0 if is_fit else 1)
        assert told["is_fit"] == is_fit
        told["by_check"] = {f["check"]: f for f in told["findings"]}
        assert len(told["by_check"]) == len(told["findings"]) or dev is not None
        return told

    return look


def checks(told: dict[str, Any]) -> dict[str, str]:
    """Check to severity."""
    return {f["check"]: f["severity"] for f in told["findings"]}


def lines(told: dict[str, Any], check: str) -> list[str]:
    """Places of a finding, without the folder of the files."""
    return [re.sub(r"[^ (]*/", "", place) for place in told["by_check"][check]["places"]]


def test_a_clean_table_is_fit_and_nothing_is_found(doctor: Doctor) -> None:
    dev = [(f"another film, the {i}th, to see", "good") for i in range(3)]
    dev += [(f"boredom of the {i}th degree", "bad") for i in range(3)]
    told = doctor(csv_of(CLEAN), dev=csv_of([(f'"{t}"', label) for t, label in dev]))
    assert told["findings"] == []
    assert told["kind"] == "table"
    assert told["train"]["labels"] == {"good": 12, "bad": 12}
    assert told["train"]["columns"] == {"text": "text", "label": "label"}
    assert told["train"]["lengths"]["unit"] == "words"
    assert told["train"]["lengths"]["percentiles"]["100"] == 9  # "the film number 0 was ..."
    assert told["eval"]["count"] == 6


@pytest.mark.parametrize(
    ("rows", "check", "severity", "count", "place"),
    [
        ([("", "good")], "empty_texts", "error", 1, "a.csv:26"),
        ([("a film", ""), ("the film", " ")], "missing_labels", "error", 2, "a.csv:26"),
        ([("too", "many", "fields")], "unreadable_rows", "error", 1, "a.csv:26"),
        ([CLEAN[0]], "repeated_rows", "note", 1, "a.csv:26 (as line 2)"),
        ([CLEAN[0]] * 12, "repeated_rows", "warning", 12, "a.csv:26 (as line 2)"),
        ([(CLEAN[0][0], "bad")], "conflicting_labels", "error", 2, "a.csv:2 ('good')"),
        (
            [("The film,number 0 was a joy to see.".replace(",", "  "), "bad")],
            "conflicting_labels_normalised",
            "note",
            2,
            "a.csv:2 ('good')",
        ),
        ([("a film", "Good")], "label_typos", "warning", 1, "a.csv:26"),
        ([("a film", "odd")], "single_example_labels", "warning", 1, "a.csv:26"),
        ([("a film", "odd"), ("b", "odd")], "rare_labels", "note", 1, "a.csv:26"),
        ([("a film", "nan")], "missing_value_labels", "warning", 1, "a.csv:26"),
        ([("a film", "1")], "numbers_among_labels", "warning", 1, "a.csv:26"),
        ([("null", "good")], "missing_value_texts", "note", 1, "a.csv:26"),
        ([("text", "label")], "repeated_header", "error", 1, "a.csv:26"),
        ([("the cafÃ© of the film", "good")], "mojibake", "warning", 1, "a.csv:26"),
        ([("itâ€™s a film", "good")], "mojibake", "warning", 1, "a.csv:26"),
        ([("a film \ufffd", "good")], "replacement_characters", "warning", 1, "a.csv:26"),
        ([("a\x00 film", "good")], "control_characters", "note", 1, "a.csv:26"),
        ([("a \ufefffilm", "good")], "inner_byte_order_marks", "note", 1, "a.csv:26"),
        ([("a film", "good"), ("x" * 1_000_000, "bad")], "huge_cells", "warning", 1, "a.csv:27"),
        ([("word " * 600, "good")], "long_texts", "note", 1, "a.csv:26"),
    ],
)
def test_each_problem_is_found_with_its_line(
    doctor: Doctor,
    rows: list[tuple[str, ...]],
    check: str,
    severity: str,
    count: int,
    place: str,
) -> None:
    told = doctor(csv_of([*CLEAN, *rows]))
    finding = told["by_check"][check]
    assert (finding["severity"], finding["count"]) == (severity, count)
    assert lines(told, check)[0] == place
    assert finding["advice"].endswith(".")


def test_all_problems_of_a_file_are_told_at_once(doctor: Doctor) -> None:
    content = csv_of(CLEAN) + b"one,two,three\n,good\ncaf\xe9,good\na film,\n" + csv_of(CLEAN[:1])
    told = doctor(content)
    assert {c for c, s in checks(told).items() if s == "error"} == {
        "unreadable_rows",
        "empty_texts",
        "undecodable_bytes",
        "missing_labels",
        "repeated_header",
    }
    assert told["by_check"]["unreadable_rows"]["count"] == 2


def test_undecodable_bytes_are_placed_and_their_encoding_guessed(doctor: Doctor) -> None:
    clean = csv_of(CLEAN)
    told = doctor(clean + "une soirée au café,good\n".encode("latin-1"))
    (place,) = lines(told, "undecodable_bytes")
    assert place == f"a.csv:26 (byte {len(clean) + len('une soir'):,}, 0xe9)"
    assert "Latin-1" in told["by_check"]["undecodable_bytes"]["what"]
    told = doctor(clean + "这家酒店很好,good\n".encode("gbk"))
    assert "GBK" in told["by_check"]["undecodable_bytes"]["what"]


@pytest.mark.parametrize(
    ("name", "clean", "bad", "other"),
    [
        ("a.csv", csv_of(CLEAN).decode(), "caf\xe9,good\n", "one,two,three\n"),
        ("a.jsonl", '{"text": "a film", "label": "b"}\n', '{"text": "\xe9"}\n', '{"text": "cut\n'),
        ("a.conll", "Ann\tB-PER\n\nshe\tO\n\n", "\xe9\tO\n\n", "Bob\n\n"),
        (
            "b.jsonl",
            '{"text": "Ann", "entities": []}\n',
            '{"text": "\xe9", "entities": []}\n',
            '{"text": "A", "entities": 3}\n',
        ),
    ],
)
def test_a_byte_that_is_not_utf8_is_one_error(
    doctor: Doctor, name: str, clean: str, bad: str, other: str
) -> None:
    """Told twice only where other rows cannot be read either."""
    told = doctor((clean + bad).encode("latin-1"), name=name)
    errors = {c for c, s in checks(told).items() if s == "error"}
    assert errors - {"one_class"} == {"undecodable_bytes"}
    told = doctor((clean + bad + other).encode("latin-1"), name=name)
    assert checks(told)["undecodable_bytes"] == "error"
    assert told["by_check"]["unreadable_rows"]["count"] == 2
    assert "is not UTF-8" in told["by_check"]["unreadable_rows"]["what"]


def test_a_mark_is_noted_and_utf16_is_an_error(doctor: Doctor) -> None:
    assert checks(doctor(b"\xef\xbb\xbf" + csv_of(CLEAN))) == {"byte_order_mark": "note"}
    assert checks(doctor(csv_of(CLEAN).decode().encode("utf-16"))) == {"utf16": "error"}


def test_letters_with_accents_and_quotes_are_no_mojibake(doctor: Doctor) -> None:
    texts = [
        "Das MENÜ” war gut",
        "São Paulo NÃO",
        "café\u2019\u201d said he",
        "в кино",
        "这 很好",
        "À la carte",
    ]
    rows = [(text, "good") for text in texts] + [(f"{text} bad", "bad") for text in texts]
    assert "mojibake" not in checks(doctor(csv_of(rows)))


def test_a_file_cut_off_is_told_with_all_that_stands_before(doctor: Doctor) -> None:
    packed = gzip.compress(csv_of([*CLEAN, ("", "good"), *CLEAN * 2000]))
    told = doctor(packed[:-20], name="a.csv.gz")
    assert checks(told)["unreadable"] == "error"
    assert checks(told)["empty_texts"] == "error"
    told = doctor(csv_of(CLEAN) + b'"never closed,good\nb,bad\n')
    assert "a quote is opened here" in told["by_check"]["unreadable"]["what"]
    assert told["train"]["count"] == 24
    told = doctor(b"")
    assert checks(told) == {"unreadable": "error"}
    told = doctor("text;label\na;b\n")
    assert "not separated by commas" in told["by_check"]["unreadable"]["what"]


def test_leaks_are_found_exactly_and_after_normalising(doctor: Doctor) -> None:
    fresh = [("something new", "good"), ("something bad", "bad")] * 10
    dev = [CLEAN[0], ("THE FILM number 1 was a joy to see!", "good"), *fresh]
    told = doctor(csv_of(CLEAN), dev=csv_of(dev))
    assert lines(told, "leaked_rows") == ["dev-a.csv:2 (as a.csv:2)"]
    assert lines(told, "leaked_rows_normalised") == ["dev-a.csv:3 (as a.csv:3)"]
    assert checks(told)["leaked_rows"] == "warning"
    told = doctor(csv_of(CLEAN), dev=csv_of(CLEAN))
    assert checks(told)["leaked_rows"] == "error"
    assert told["by_check"]["leaked_rows"]["share"] == 1.0
    twice = [*CLEAN[:2], ("A new text", "good"), ("a new text", "good"), ("a new text", "good")]
    told = doctor(csv_of(twice), dev=csv_of([("a new text", "good"), ("a NEW text", "good")]))
    assert lines(told, "leaked_rows") == ["dev-a.csv:2 (as a.csv:5)"]  # the first to the letter
    assert lines(told, "leaked_rows_normalised") == ["dev-a.csv:3 (as a.csv:4)"]


def test_labels_that_training_never_sees_and_a_dev_set_of_one_class(doctor: Doctor) -> None:
    told = doctor(csv_of(CLEAN), dev=csv_of([("a new one", "good"), ("and a mean one", "ugly")]))
    assert checks(told)["unseen_labels"] == "error"
    assert lines(told, "unseen_labels") == ["dev-a.csv:3"]
    told = doctor(csv_of(CLEAN), dev=csv_of([("a new one", "good"), ("another", "good")]))
    assert checks(told)["one_class_to_judge_by"] == "error"


def test_balance_is_told_when_it_matters(doctor: Doctor) -> None:
    goods = [(f"a fine film number {i}", "good") for i in range(300)]
    bads = [(f"a poor film number {i}", "bad") for i in range(31)]
    assert checks(doctor(csv_of(goods + bads[:10])))["dominant_label"] == "warning"
    assert checks(doctor(csv_of([*goods, *bads]))).keys() == {"dominant_label"}
    oks = [(f"a film like any other, number {i}".replace(",", ""), "ok") for i in range(150)]
    assert checks(doctor(csv_of([*goods, *oks, *bads[:25]]))) == {"uneven_labels": "note"}
    assert checks(doctor(csv_of(goods)))["one_class"] == "error"


def test_scores_and_lists_of_labels_are_not_taken_for_classes(doctor: Doctor) -> None:
    scores = [(f"text number {i}", str(i / 8)) for i in range(40)]
    told = doctor(csv_of(scores))
    assert told["train"]["label_kind"] == "scores"
    assert checks(told) == {}
    rows = [{"text": f"text number {i}", "labels": ["a", "b"][: i % 3]} for i in range(40)]
    told = doctor("".join(json.dumps(row) + "\n" for row in rows), name="a.jsonl")
    assert told["train"]["label_kind"] == "lists"
    assert told["train"]["labels"] == {"a": 26, "b": 13}
    assert checks(told) == {"texts_without_labels": "note"}
    assert told["by_check"]["texts_without_labels"]["count"] == 14  # 0, 3, ..., 39
    several = [(f"text number {i}", ["joy", "anger", '"joy,anger"'][i % 3]) for i in range(60)]
    told = doctor(csv_of(several))
    assert told["train"]["labels"] == {"joy": 40, "anger": 40}
    assert checks(told) == {}


SEVERAL = [(f"text number {i}", ["joy", "anger", '"joy,anger"'][i % 3]) for i in range(60)]


def test_an_empty_cell_is_no_error_where_a_text_has_several_labels(
    doctor: Doctor, tmp_path: Path
) -> None:
    """As finetune reads it, which takes the same rows."""
    content = csv_of([*SEVERAL, ("nothing here", ""), ("nor here", " ")])
    told = doctor(content)
    assert checks(told) == {"texts_without_labels": "note"}
    assert lines(told, "texts_without_labels") == ["a.csv:62", "a.csv:63"]
    assert (told["train"]["count"], told["train"]["labels"]) == (62, {"joy": 40, "anger": 40})
    config = FinetuneConfig(model="m", data=str(tmp_path / "a.csv"), output="o")
    tables = read_task_tables(config)
    assert (tables.kind.name, len(tables.train) + len(tables.dev)) == ("multilabel", 62)

    single = doctor(csv_of([*CLEAN, (CLEAN[0][0], "")]))  # no other label, and no repeat
    assert checks(single) == {"missing_labels": "error"}
    assert (single["train"]["count"], single["train"]["labels"]) == (24, {"good": 12, "bad": 12})


def test_what_is_judged_by_is_read_as_what_is_learned(doctor: Doctor) -> None:
    """This dev set alone shows no sign between labels."""
    told = doctor(csv_of(SEVERAL), dev=csv_of([("new", '"anger,joy"'), ("none", "")]))
    assert checks(told) == {"texts_without_labels": "note"}
    assert told["eval"]["labels"] == {"anger": 1, "joy": 1}
    slashed = csv_of([("one", "a/b"), ("two", "b"), ("three", "a"), ("none", "")])
    told = doctor(slashed, "--table.label_separator", "/", dev=csv_of([("four", "b/a")]))
    assert told["train"]["labels"] == told["eval"]["labels"] | {"a": 2, "b": 2}
    assert not any(severity == "error" for severity in checks(told).values())


def test_lists_that_are_missing_or_all_empty_are_errors(doctor: Doctor) -> None:
    rows: list[dict[str, Any]] = [{"text": f"text {i}", "labels": ["a"]} for i in range(12)]
    rows += [{"text": "no list", "labels": None}, {"text": "none of them", "labels": []}]
    told = doctor("".join(json.dumps(row) + "\n" for row in rows), name="a.jsonl")
    assert checks(told) == {"missing_labels": "error", "texts_without_labels": "note"}
    assert lines(told, "missing_labels") == ["a.jsonl:13"]
    assert "[]" in told["by_check"]["missing_labels"]["advice"]
    told = doctor('{"text": "a", "labels": []}\n' * 2, name="a.jsonl")
    assert checks(told)["texts_without_labels"] == "error"


def test_classes_written_as_floats_and_free_text_for_labels(doctor: Doctor) -> None:
    told = doctor(csv_of([(f"text number {i}", f"{i % 2}.0") for i in range(40)]))
    assert checks(told) == {"float_labels": "note"}
    assert told["train"]["labels"] == {"0": 20, "1": 20}
    told = doctor(csv_of([(f"text number {i}", f"comment number {i}") for i in range(40)]))
    assert checks(told) == {"labels_are_free_text": "error"}


def test_suspicious_columns(doctor: Doctor) -> None:
    header = "id,text,label,split,note,code,stars"
    rows = [
        (f"r{i}", text, label, "train", "nan" if i % 2 else "", label[0], str(i % 5))
        for i, (text, label) in enumerate(CLEAN)
    ]
    told = doctor(csv_of(rows, header))
    assert checks(told) == dict.fromkeys(
        ("id_columns", "constant_columns", "empty_columns", "columns_that_tell_the_label"), "note"
    )
    for check, column in (("id_columns", "id"), ("constant_columns", "split")):
        assert f"'{column}'" in told["by_check"][check]["what"]
    assert "'stars'" not in json.dumps(told["findings"])


def test_columns_that_are_no_texts(doctor: Doctor) -> None:
    rows = [(str(i), text, label) for i, (text, label) in enumerate(CLEAN)]
    told = doctor(csv_of(rows, "id,text,label"), "--text_column", "id")
    assert checks(told)["text_is_a_number"] == "error"
    twice = [(label, text, label) for text, label in CLEAN]
    told = doctor(csv_of(twice, "name,text,label"), "--text_column", "name")
    assert checks(told)["text_is_the_label"] == "error"
    names = ["poor", "good"] * 10
    said = [(f"__label__{name} {i}", name) for i, name in enumerate(names)]
    assert checks(doctor(csv_of(said)))["label_in_text"] == "warning"


def test_one_hot_columns_are_told_from_several_labels(doctor: Doctor) -> None:
    one = [(text, str(int(i % 3 == 0)), str(int(i % 3 == 1)), str(int(i % 3 == 2)))
           for i, (text, _) in enumerate(CLEAN)]  # fmt: skip
    told = doctor(csv_of(one, "text,joy,fear,anger"))
    assert checks(told) == {"one_hot_columns": "error"}
    many = [(text, str(i % 2), str(i % 3 % 2)) for i, (text, _) in enumerate(CLEAN)]
    told = doctor(csv_of(many, "text,joy,great fear"))
    assert checks(told) == {"one_hot_columns": "note"}
    advice = told["by_check"]["one_hot_columns"]["advice"]
    assert "--table.label_columns joy 'great fear'." in advice
    assert checks(doctor(csv_of([(text,) for text, _ in CLEAN], "text"))) == {
        "no_label_column": "error"
    }


def test_columns_of_labels_that_are_named_are_read_as_labels(doctor: Doctor) -> None:
    """One 1 a row is no reason to speak then, and a row of 0 is a text without labels."""
    rows = [(text, str(i % 2), str((i + 1) % 2)) for i, (text, _) in enumerate(CLEAN)]
    told = doctor(csv_of(rows, "text,joy,fear"), "--table.label_columns", "[joy, fear]")
    assert checks(told) == {}
    assert (told["train"]["label_kind"], told["train"]["labels"]) == (
        "lists",
        {"joy": 12, "fear": 12},
    )
    rows += [("neither of them", "0", "0"), ("what is this", "1", "maybe")]
    told = doctor(csv_of(rows, "text,joy,fear"), "--table.label_columns", "[joy, fear]")
    assert checks(told) == {"texts_without_labels": "note", "labels_of_another_type": "error"}
    assert lines(told, "texts_without_labels") == ["a.csv:26"]
    assert lines(told, "labels_of_another_type") == ["a.csv:27"]
    assert "'maybe' is neither 0 nor 1" in told["by_check"]["labels_of_another_type"]["what"]


def test_pairs_with_one_side_empty(doctor: Doctor) -> None:
    rows = [(text, f"is it {i}", label) for i, (text, label) in enumerate(CLEAN)]
    header = "text,text_b,label"
    assert checks(doctor(csv_of(rows, header))) == {}
    told = doctor(csv_of([*rows, ("alone", "", "good"), ("", "", "bad")], header))
    assert lines(told, "half_empty_pairs") == ["a.csv:26"]
    assert lines(told, "empty_texts") == ["a.csv:27"]


def test_json_values_that_are_no_texts_or_labels(doctor: Doctor) -> None:
    rows: list[object] = [{"text": t, "label": label} for t, label in CLEAN]
    rows += [{"text": 3, "label": "good"}, {"text": None, "label": "good"}]
    rows += [{"text": "x", "label": {"a": 1}}, {"text": "half \ud83d", "label": "good"}, [1]]
    content = "".join(json.dumps(row) + "\n" for row in rows) + '{"text": "cut'
    told = doctor(content, name="a.jsonl")
    assert {c for c, s in checks(told).items() if s == "error"} == {
        "texts_of_another_type",
        "empty_texts",
        "labels_of_another_type",
        "half_characters",
        "unreadable_rows",
    }
    assert lines(told, "unreadable_rows") == ["a.jsonl:29", "a.jsonl:30"]


def test_parquet_places_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for text, _ in CLEAN] + [None]
    table = pyarrow.table({"text": texts, "label": [label for _, label in CLEAN] + ["good"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert run(["doctor", str(tmp_path / "a.parquet"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["check"], finding["places"]) == (
        "empty_texts",
        [f"{tmp_path / 'a.parquet'}, row 25"],
    )


def test_a_tokenizer_gives_tokens_and_unknown_ones(
    doctor: Doctor, tiny_tokenizer_folder: Path
) -> None:
    rows = [("good film", "a"), ("bad film", "b")] * 6  # [CLS] x y [SEP]
    told = doctor(csv_of(rows), "--tokenizer", str(tiny_tokenizer_folder))
    lengths = told["train"]["lengths"]
    assert (lengths["unit"], lengths["total"], lengths["unknown_share"]) == ("tokens", 48, 0.0)
    told = doctor(csv_of([*rows, ("\u6f22 " * 90, "a")]), "--tokenizer", str(tiny_tokenizer_folder))
    assert checks(told)["unknown_tokens"] == "error"
    assert told["train"]["lengths"]["unknown_share"] == 90 / (48 + 92)
    told = doctor(csv_of([*rows, ("good " * 511, "a")]), "--tokenizer", str(tiny_tokenizer_folder))
    assert told["train"]["lengths"]["share_over"] == {"128": 1 / 13, "256": 1 / 13, "512": 1 / 13}


CONLL = "Ann\tB-PER\nLee\tI-PER\nsleeps\tO\n\nIn\tO\nRome\tB-LOC\n\n"


def conll(start: int, num: int) -> str:
    return "".join(
        CONLL.replace("Ann", f"Ann{i}").replace("In", f"In{i}") for i in range(start, num)
    )


def test_clean_tagged_sentences_are_fit(doctor: Doctor) -> None:
    told = doctor(conll(0, 20), name="a.conll", dev=conll(20, 30))
    assert told["kind"] == "tagged"
    assert told["findings"] == []
    assert told["train"]["columns"] == {"scheme": "iob2"}
    assert told["train"]["count"] == 40


def test_tag_sequences_that_are_invalid(doctor: Doctor) -> None:
    bad = "Bob\tI-PER\nsat\tO\n\nhe\tB-PER\nran\n\n"
    told = doctor(conll(0, 20) + bad, name="a.conll")
    assert checks(told) == {"invalid_tag_sequences": "error", "unreadable_rows": "error"}
    assert lines(told, "invalid_tag_sequences") == ["a.conll:141"]
    assert lines(told, "unreadable_rows") == ["a.conll:144"]
    told = doctor(conll(0, 20), name="a.conll", dev=conll(20, 30) + "Kim\tB-ORG\n\n")
    assert lines(told, "unseen_labels") == ["dev-a.conll:71"]


def test_rows_of_tokens_and_tags_of_different_length(doctor: Doctor) -> None:
    rows = [{"tokens": ["Ann", f"Lee{i}"], "tags": ["B-PER", "I-PER"]} for i in range(20)]
    rows += [{"tokens": ["O'Neill", "sat"], "tags": ["B-PER"]}, {"tokens": [], "tags": []}]
    told = doctor("".join(json.dumps(row) + "\n" for row in rows), name="a.jsonl")
    assert told["kind"] == "tagged"
    assert checks(told) == {"tokens_without_tags": "error", "empty_texts": "warning"}
    assert lines(told, "tokens_without_tags") == ["a.jsonl:21"]
    assert "2 tokens and 1 tag" in told["by_check"]["tokens_without_tags"]["what"]
    assert "sentences has not as many" in told["by_check"]["tokens_without_tags"]["what"]


def test_texts_and_their_spans_are_tagged_sentences(doctor: Doctor) -> None:
    """Words are parted as BERT does, Chinese ones by character; a fault is told with its line."""
    rows = [
        {"text": f"Ann Lee{i} saw it.", "entities": [{"start": 0, "end": 8, "label": "PER"}]}
        for i in range(10)
    ]
    rows += [
        {"text": f"{i}北京很大", "entities": [{"start": 1, "end": 3, "label": "LOC"}]}
        for i in range(10)
    ]
    clean = "".join(json.dumps(row) + "\n" for row in rows)
    told = doctor(clean, name="a.jsonl")
    assert (told["kind"], told["train"]["columns"], checks(told)) == (
        *("tagged", {"scheme": "iob2"}),
        {},
    )
    assert told["train"]["labels"]["B-LOC"] == told["train"]["labels"]["I-LOC"] == 10
    bad = [
        {"text": "Bob", "entities": [{"start": 0, "end": 4, "label": "PER"}]},
        {"text": "Bob ran", "entities": [{"start": 0, "end": 3}, {"start": 2, "end": 5}]},
    ]
    told = doctor(clean + "".join(json.dumps(row) + "\n" for row in bad), name="a.jsonl")
    assert checks(told) == {"unreadable_rows": "error"}
    assert lines(told, "unreadable_rows") == ["a.jsonl:21", "a.jsonl:22"]
    finding = told["by_check"]["unreadable_rows"]
    folder = finding["places"][0].removesuffix("a.jsonl:21")
    assert finding["what"] == (
        "sentences cannot be read (the span 0 to 4 lies outside the text of 3 characters, "
        f"{folder}a.jsonl:21; a span needs start and end (whole numbers) and label (a word), "
        f"{folder}a.jsonl:22)"
    )
    assert "characters from 0" in finding["advice"]
    assert "blank line" not in finding["advice"]


def test_spans_that_end_inside_a_word_are_told_as_training_tells_them(
    doctor: Doctor, tiny_tokenizer_folder: Path
) -> None:
    def row(text: str, *spans: tuple[int, int]) -> str:
        entities = [{"start": a, "end": b, "label": "PER"} for a, b in spans]
        return json.dumps({"text": text, "entities": entities}) + "\n"

    content = row("Ann saw Bob-Ray.", (0, 3), (8, 11)) * 2  # whole words, the sign is one
    content += row("Annika saw Bobs.", (0, 3), (12, 14)) + row("Ann", (1, 9))
    for options in ((), ("--tokenizer", str(tiny_tokenizer_folder))):
        told = doctor(content, *options, name="a.jsonl")
        finding = told["by_check"]["spans_inside_words"]
        assert (finding["severity"], finding["count"], finding["total"]) == ("warning", 2, 6)
        assert lines(told, "spans_inside_words") == [
            "a.jsonl:3 ('Ann' cuts 'Annika')",
            "a.jsonl:3 ('ob' cuts 'Bobs')",
        ]
    path = Path(told["train"]["data"])
    assert read_tagged(path, TableConfig(bad_rows="skip"), split=plain_words).num_widened == 2


@pytest.mark.parametrize(
    ("name", "row"),
    [("a.csv", 'a film,"[1, 0, 0]"\n'), ("a.jsonl", '{"text": "a", "label": [1, 0, 0]}\n')],
)
def test_a_row_of_0_and_1_is_no_list_of_labels(doctor: Doctor, name: str, row: str) -> None:
    head = "text,label\n" if name == "a.csv" else ""
    told = doctor(head + row * 3, name=name)
    assert checks(told)["repeated_in_list"] == "error"
    assert lines(told, "repeated_in_list")[0] == f"{name}:{2 if head else 1}"


def test_slips_of_a_tag_type(doctor: Doctor) -> None:
    told = doctor(conll(0, 20) + "Bob\tB-PRE1\n\nX\tB-Loc\n\n", name="a.conll")
    assert lines(told, "label_typos") == ["a.conll:143"]


def paragraphs(num: int) -> str:
    return "\n\n".join(f"paragraph {i} of a book\nwith a second line {i}" for i in range(num))


def test_a_clean_corpus_is_fit_and_a_messy_one_is_told(doctor: Doctor) -> None:
    told = doctor(paragraphs(200), name="a.txt")
    assert (told["kind"], told["findings"], told["train"]["count"]) == ("text", [], 200)
    footer = paragraphs(200).replace("\n\n", "\nAll rights reserved.\n\n")
    told = doctor(footer, name="a.txt")
    assert checks(told) == {"lines_in_many_documents": "warning"}
    assert told["by_check"]["lines_in_many_documents"]["count"] == 199
    content = paragraphs(200).encode() + b"\n\ncaf\xe9\n\n" + b"again\n\n" * 3 + b"\x07bell\n\n"
    told = doctor(content, name="a.txt")
    assert checks(told) == {
        "undecodable_bytes": "error",
        "undecodable_documents": "error",
        "repeated_documents": "note",
        "control_characters": "note",
    }
    assert checks(doctor("", name="a.txt")) == {"nothing_to_use": "error"}
    told = doctor("x" * 1_000_000, name="a.txt")
    assert checks(told) == {"very_long_documents": "note"}


def test_a_corpus_of_which_four_fifths_repeat(doctor: Doctor) -> None:
    content = "".join(f"line {max(i - 80, 0)}\n" for i in range(100))
    told = doctor(content, "--documents", "line", name="a.txt")
    assert checks(told) == {"repeated_documents": "warning"}
    assert told["by_check"]["repeated_documents"]["count"] == 80


def test_a_folder_of_texts_names_each_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.txt").write_text("one\n\ntwo\n\n\x07\x07x\n")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n{"text": ""}\n{"text": "one"}\n{"te')
    assert run(["doctor", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    found = {f["check"]: f["places"] for f in told["findings"]}
    assert found == {
        "undecodable_documents": [f"{tmp_path}/c.jsonl:4"],
        "control_characters": [f"{tmp_path}/b.txt:5"],
        "repeated_documents": [f"{tmp_path}/c.jsonl:3 (as {tmp_path}/b.txt:1)"],
        "empty_texts": [f"{tmp_path}/c.jsonl:2"],
    }


def test_plain_lines_where_nobody_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(csv_of([*CLEAN, ("", "good"), CLEAN[0]]))
    assert run(["doctor", str(path)]) == 1
    out = capsys.readouterr().out
    assert "error: empty_texts: 1 of 26 (3.85%) rows has no text; first at" in out
    assert f"{path}:26" in out
    assert out.index("error: ") < out.index("note: repeated_rows")
    assert out.endswith("1 error, 1 note: training on it as it is would be wrong\n")
    path.write_bytes(csv_of(CLEAN))
    assert run(["doctor", str(path)]) == 0
    assert capsys.readouterr().out.endswith("nothing found\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["missing.csv"], "cannot be read"),
        (["a.xlsx"], "'.xlsx' is not read"),
        (["a.csv", "--label_column", "lable"], "did you mean 'label'?"),
        (["a.csv", "--eval", "missing.csv"], "cannot be read"),
        (["a.csv", "--tokenizer", "."], "holds no tokenizer.json"),
        ([], "data"),
    ],
)
def test_a_mistake_in_the_call_is_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_bytes(csv_of(CLEAN))
    Path("a.xlsx").write_bytes(b"PK")
    assert run(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


def test_finetune_says_its_short_form_before_training(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(csv_of([*CLEAN, ("a film", "godo")]))
    dev = [("The film: number 0 was a joy to see", "good"), ("a bore of another kind", "bad")]
    (tmp_path / "b.csv").write_bytes(csv_of(dev))
    config = FinetuneConfig(
        model="m", data=str(tmp_path / "a.csv"), eval=str(tmp_path / "b.csv"), output="o"
    )
    warnings = [line for line in read_task_tables(config).describe() if "warning" in line]
    assert len(warnings) == 2
    assert "stands among those to learn from but for case" in warnings[0]
    assert "'godo' (1 row) of 'good' (12)" in warnings[1]
