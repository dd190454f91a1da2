"""`doctor` on pairs to embed: fit where finetune trains on them, each fault with its line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli import run
from bertsmith.data.checkup.pairs import has_pairs
from bertsmith.data.config import TableConfig
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.texts.tables import read_task_tables
from bertsmith.tasks.config import EmbeddingConfig

PAIRS = [(f"question number {i}", f"the answer to number {i}") for i in range(12)]


def csv_of(header: str, rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join([header, *(",".join(row) for row in rows), ""])


def scored() -> list[tuple[str, ...]]:
    return [(*pair, str(i / 4)) for i, pair in enumerate(PAIRS)]


def with_negatives() -> list[tuple[str, ...]]:
    return [(*pair, f"what number {i} is not") for i, pair in enumerate(PAIRS)]


def look(
    path: Path,
    content: str,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> dict[str, Any]:
    path.write_text(content)
    code = run(["doctor", str(path), *options, "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if told["is_fit"] else 1)
    told["by_check"] = {finding["check"]: finding for finding in told["findings"]}
    return told


def checks(told: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["severity"] for finding in told["findings"]}


@pytest.mark.parametrize(
    ("header", "rows", "columns"),
    [
        ("text,text_b", [*PAIRS], {}),
        ("text,text_b,score", scored(), {"score": "score"}),
        ("text,text_b,negative", with_negatives(), {"negative": "negative"}),
    ],
)
def test_pairs_that_finetune_embeds_are_fit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    header: str,
    rows: Sequence[tuple[str, ...]],
    columns: dict[str, str],
) -> None:
    path = tmp_path / "a.csv"
    told = look(path, csv_of(header, rows), capsys)
    assert told["kind"] == "pairs"
    assert checks(told) == {"taken_for_pairs": "note"}
    assert told["train"]["columns"] == {"text": "text", "pair": "text_b"} | columns
    assert (told["train"]["unit"], told["train"]["count"]) == ("pairs", 12)
    config = FinetuneConfig(
        model="m", data=str(path), output="o", task="embedding", embedding=EmbeddingConfig()
    )
    assert read_task_tables(config).kind.name == "embedding"

    told = look(path, csv_of(header, rows), capsys, "--kind", "pairs")
    assert checks(told) == {}
    objects = [dict(zip(header.split(","), row, strict=True)) for row in rows]
    lines = "".join(json.dumps(one) + "\n" for one in objects)
    told = look(tmp_path / "a.jsonl", lines, capsys)
    assert (told["kind"], checks(told)) == ("pairs", {"taken_for_pairs": "note"})


def test_texts_are_measured_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = look(tmp_path / "a.csv", csv_of("text,text_b,negative", with_negatives()), capsys)
    lengths = told["train"]["lengths"]  # 3 words, 5 and 5, in each of twelve rows
    assert (lengths["total"], lengths["percentiles"]["100"]) == (12 * 13, 5)
    assert run(["doctor", str(tmp_path / "a.csv")]) == 0
    out = capsys.readouterr().out
    assert "words in a text: " in out
    assert "12 pairs; text 'text', pair 'text_b', negative 'negative'" in out


@pytest.mark.parametrize(
    ("header", "row", "check", "severity", "place"),
    [
        ("text,text_b", ("", ""), "empty_texts", "error", "a.csv:14"),
        ("text,text_b", ("alone", ""), "half_empty_pairs", "error", "a.csv:14"),
        ("text,text_b,negative", ("a", "b", ""), "half_empty_pairs", "error", "a.csv:14"),
        ("text,text_b", PAIRS[0], "repeated_rows", "note", "a.csv:14 (as line 2)"),
        ("text,text_b", ("a b", "a b "), "equal_texts", "warning", "a.csv:14"),
        ("text,text_b,score", ("a b", "a b", "1"), "equal_texts", "note", "a.csv:14"),
        ("text,text_b,negative", ("a", "b", "b"), "equal_negatives", "warning", "a.csv:14"),
        ("text,text_b,score", ("a", "b", ""), "missing_scores", "error", "a.csv:14"),
        ("text,text_b,score", ("a", "b", "x"), "scores_that_are_no_numbers", "error", "a.csv:14"),
        (
            "text,text_b,score",
            ("a", "b", "1e99"),
            "scores_that_are_no_numbers",
            "error",
            "a.csv:14",
        ),
        ("text,text_b,score", (*PAIRS[0], "9"), "conflicting_labels", "note", "a.csv:2 ('0')"),
        ("text,text_b", ("text", "text_b"), "repeated_header", "error", "a.csv:14"),
        ("text,text_b", ("one", "two", "three"), "unreadable_rows", "error", "a.csv:14"),
    ],
)
def test_each_fault_of_a_pair_is_found_with_its_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    header: str,
    row: tuple[str, ...],
    check: str,
    severity: str,
    place: str,
) -> None:
    rows: dict[int, list[tuple[str, ...]]] = {
        2: [*PAIRS],
        3: scored() if "score" in header else with_negatives(),
    }
    content = csv_of(header, [*rows[header.count(",") + 1], row])
    told = look(tmp_path / "a.csv", content, capsys, "--kind", "pairs")
    assert checks(told) == {check: severity}
    assert told["by_check"][check]["places"][0] == f"{tmp_path}/{place}"


def test_one_pair_with_several_negatives_does_not_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*with_negatives(), (*PAIRS[0], "another that it is not")]
    told = look(tmp_path / "a.csv", csv_of("text,text_b,negative", rows), capsys)
    assert "repeated_rows" not in checks(told)


def test_first_texts_of_many_pairs_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = [("the same", f"belongs to it {i}") for i in range(10)]
    told = look(tmp_path / "a.csv", csv_of("text,text_b", PAIRS + often), capsys, "--kind", "pairs")
    assert checks(told) == {"common_anchors": "note"}
    finding = told["by_check"]["common_anchors"]
    assert (finding["count"], finding["total"]) == (10, 22)
    assert finding["places"] == [f"{tmp_path}/a.csv:14"]
    few = csv_of("text,text_b", PAIRS + often[:9])
    assert checks(look(tmp_path / "a.csv", few, capsys, "--kind", "pairs")) == {}


def test_leaks_scores_to_judge_by_and_one_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dev = tmp_path / "dev.csv"
    dev.write_text(csv_of("text,text_b", [PAIRS[3], ("new", "newer"), (PAIRS[0][0], "other")]))
    told = look(
        tmp_path / "a.csv", csv_of("text,text_b,score", scored()), capsys, "--eval", str(dev)
    )
    assert checks(told) == {
        "leaked_rows": "error",
        "no_label_column": "error",
        "taken_for_pairs": "note",
    }
    assert told["by_check"]["leaked_rows"]["places"] == [f"{dev}:2 (as {tmp_path}/a.csv:5)"]
    same = [(*pair, "1") for pair in PAIRS]
    told = look(tmp_path / "a.csv", csv_of("text,text_b,score", same), capsys)
    assert checks(told) == {"one_score": "error", "taken_for_pairs": "note"}


def test_pairs_with_a_label_stay_a_table_unless_pairs_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = csv_of("text,text_b,label", scored())
    assert look(tmp_path / "a.csv", content, capsys)["kind"] == "table"
    told = look(tmp_path / "a.csv", content, capsys, "--kind", "pairs")
    assert told["train"]["columns"] == {"text": "text", "pair": "text_b", "score": "label"}


def test_columns_of_0_and_1_beside_two_texts_may_be_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(*pair, str(i % 2), str(i % 3 % 2)) for i, pair in enumerate(PAIRS)]
    content = csv_of("text,text_b,joy,fear", rows)
    told = look(tmp_path / "a.csv", content, capsys)
    assert checks(told) == {"one_hot_columns": "note", "taken_for_pairs": "note"}
    assert checks(look(tmp_path / "a.csv", content, capsys, "--kind", "pairs")) == {}


@pytest.mark.parametrize(
    ("header", "options", "complaint"),
    [
        ("text,other", ("--kind", "pairs"), "there is no second text here"),
        ("text,text_b,score,similarity", (), "several columns could be the score"),
        ("text,text_b,a,b", ("--kind", "pairs", "--table.label_columns", "[a, b]"), "has none"),
    ],
)
def test_a_call_that_does_not_fit_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    header: str,
    options: tuple[str, ...],
    complaint: str,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(csv_of(header, [tuple("x" for _ in header.split(","))]))
    assert run(["doctor", str(path), *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert complaint in err


def test_two_texts_are_told_by_their_names_or_the_user() -> None:
    assert has_pairs(("Text", "text_b"), TableConfig())
    assert has_pairs(("a", "b"), TableConfig(text_column="a", pair_column="b"))
    assert not has_pairs(("text", "text_b"), TableConfig(text_column="text"))
    assert not has_pairs(("text", "b"), TableConfig())
