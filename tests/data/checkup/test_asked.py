"""`doctor` finds what is wrong with questions on texts, and is silent on clean ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli import run

CONTEXTS = [f"Number {i} of the towns lies by the river of that name." for i in range(8)]


def asked(i: int, **more: Any) -> dict[str, Any]:
    return {
        "id": str(i),
        "question": f"Where does number {i} lie?",
        "answers": [
            {"text": "by the river", "answer_start": CONTEXTS[i % 8].index("by the river")}
        ],
    } | more


def squad(path: Path, *questions: tuple[int, dict[str, Any]]) -> Path:
    paragraphs = [{"context": CONTEXTS[i % 8], "qas": [qa]} for i, qa in questions]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


CLEAN = [(i, asked(i)) for i in range(6)]


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = run(["doctor", *words, "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["kind"] == "questions"
    told["by_check"] = {finding["check"]: finding for finding in told["findings"]}
    return code, told


def test_clean_questions_have_no_findings_in_either_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "b.jsonl"
    flat.write_text("".join(json.dumps(qa | {"context": CONTEXTS[i]}) + "\n" for i, qa in CLEAN))
    for path in (squad(tmp_path / "a.json", *CLEAN), flat):
        code, told = look(capsys, str(path))
        assert (code, told["findings"]) == (0, [])
        assert told["train"]["count"] == 6
        assert set(told["train"]["lengths"]["share_over"]) == {"384", "512"}


WRONG = {"answers": [{"text": "by the river", "answer_start": 3}]}


@pytest.mark.parametrize(
    ("bad", "check", "severity"),
    [
        ((7, asked(7, **WRONG)), "misplaced_answers", "error"),
        ((7, asked(7, question="")), "unreadable_rows", "error"),
        ((7, asked(7, id="3")), "repeated_ids", "error"),
        ((7, asked(7, answers=[], is_impossible=True)), "impossible_questions", "note"),
        ((5, asked(5, id="again")), "repeated_rows", "warning"),
        (
            (5, asked(5, id="x", answers=[{"text": "Number", "answer_start": 0}])),
            "conflicting_labels",
            "warning",
        ),
    ],
)
def test_each_kind_of_fault_is_found_with_its_place(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    bad: tuple[int, dict[str, Any]],
    check: str,
    severity: str,
) -> None:
    code, told = look(capsys, str(squad(tmp_path / "a.json", *CLEAN, bad)))
    finding = told["by_check"][check]
    assert finding["severity"] == severity
    assert "paragraphs[6].qas[0]" in " ".join(finding["places"])
    assert code == (1 if severity == "error" else 0)


def test_contexts_on_both_sides_are_found_though_the_questions_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = squad(tmp_path / "a.json", *CLEAN)
    dev = squad(tmp_path / "b.json", (7, asked(7)), (0, asked(0, question="What lies there?")))
    code, told = look(capsys, str(train), "--eval", str(dev))
    assert told["by_check"]["leaked_contexts"]["count"] == 1
    assert "leaked_rows" not in told["by_check"]
    assert code == 1


def test_a_damaged_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    for content, said in (
        ('{"data": [{"paragraphs": [', "not valid JSON"),
        ("[1, 2]", "has no list 'data'"),
    ):
        path.write_text(content)
        code, told = look(capsys, str(path))
        assert code == 1
        assert said in told["by_check"]["unreadable"]["what"]


def test_long_contexts_are_told_as_windows_and_long_answers_as_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "word " * 600
    gold = {"text": "word " * 39 + "word", "answer_start": 0}
    row = {"id": "1", "question": "What?", "context": context, "answers": [gold]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    _, told = look(capsys, str(tmp_path / "a.jsonl"))
    assert told["by_check"]["long_contexts"]["severity"] == "note"
    assert told["by_check"]["long_answers"]["severity"] == "warning"
