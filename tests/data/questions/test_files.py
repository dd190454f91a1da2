"""Files of questions: what is read, and where what cannot be used stands."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from bertsmith.data.config import TableConfig
from bertsmith.data.questions.files import QuestionReader, form_of, read_questions
from bertsmith.errors import UserError

CONTEXT = "Zoé lives in Rome. Rome is old."
SKIP = TableConfig(bad_rows="skip")


def qa(**more: Any) -> dict[str, Any]:
    base = {"id": "1", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 13}]}
    return {k: v for k, v in (base | more).items() if v is not ...}


def squad(path: Path, *qas: Any, context: Any = CONTEXT) -> Path:
    content = {
        "version": "v2.0",
        "data": [{"paragraphs": [{"context": context, "qas": list(qas)}]}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps({"context": CONTEXT} | row) + "\n" for row in rows))
    return path


def test_all_forms_say_the_same(tmp_path: Path) -> None:
    impossible = qa(id="2", answers=[], is_impossible=True, plausible_answers=[{"text": "x"}])
    nested = squad(tmp_path / "a.json", qa(), impossible)
    packed = tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + nested.read_bytes()))
    rows = [
        {"id": "1", "question": "Where?", "answers": {"text": ["Rome"], "answer_start": [13]}},
        {"id": "2", "question": "Where?", "answers": {"text": [], "answer_start": []}},
    ]
    flat = lines(tmp_path / "c.jsonl", qa(), rows[1])
    table = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(
        pa.Table.from_pylist([{"context": CONTEXT} | r for r in rows]), table
    )
    for path in (nested, packed, flat, table):
        assert form_of(path, is_asked=False) is not None
        _, found = read_questions(path, TableConfig())
        assert [(one.id, one.question, one.context, one.answers) for one in found] == [
            ("1", "Where?", CONTEXT, (("Rome", 13),)),
            ("2", "Where?", CONTEXT, ()),
        ]


def test_rows_without_an_id_are_named_by_their_number(tmp_path: Path) -> None:
    _, found = read_questions(lines(tmp_path / "a.jsonl", qa(id=...), qa(id=7)), TableConfig())
    assert [one.id for one in found] == ["1", "7"]


def test_other_files_are_none_of_questions(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": "y"}\n')
    (tmp_path / "b.json").write_text('{"text": "x"}')
    (tmp_path / "c.csv").write_text("question,context\n")
    for name in ("a.jsonl", "b.json", "c.csv"):
        assert form_of(tmp_path / name, is_asked=False) is None
    with pytest.raises(UserError, match=r"a\.jsonl: holds no questions on texts; give SQuAD's"):
        form_of(tmp_path / "a.jsonl", is_asked=True)


BAD = [
    (qa(id=...), "there is no 'id'"),
    (qa(question=" "), "the question is empty"),
    (qa(question=5), "'question' is no text"),
    (qa(question="\ud800 x"), "the question holds half a surrogate pair"),
    (qa(answers=...), "there are no 'answers'"),
    (qa(answers=[]), "it has no answers, and 'is_impossible' is not true"),
    (qa(is_impossible=True), "it has answers, and 'is_impossible' is true"),
    (qa(is_impossible="no"), "'is_impossible' is neither true nor false"),
    (qa(answers=["Rome"]), "'answers' is neither a list of objects"),
    (qa(answers={"text": ["a"], "answer_start": []}), "has 1 texts and 0 starts"),
    (qa(answers=[{"text": "Rome", "answer_start": "13"}]), "an answer needs text, and answer_sta"),
    (qa(answers=[{"text": " ", "answer_start": 3}]), "an answer is empty"),
    (
        qa(answers=[{"text": "Rome", "answer_start": 12}]),
        "the answer 'Rome' does not stand at 12, where ' Rom' stands; it stands at 13, 19",
    ),
    (
        qa(answers=[{"text": "rome", "answer_start": 13}]),
        "it stands nowhere in it, but for upper and lower case",
    ),
    (
        qa(answers=[{"text": "Rome", "answer_start": 400}]),
        "begins at 400, outside the context of 31 characters; it stands at 19, 13",
    ),
    (qa(answers=[{"text": "Rome", "answer_start": -18}]), "begins at -18, outside the context"),
]


@pytest.mark.parametrize(("bad", "said"), BAD)
def test_a_bad_question_is_told_with_its_place_or_skipped(
    tmp_path: Path, bad: dict[str, Any], said: str
) -> None:
    path = squad(tmp_path / "a.json", qa(id="good"), bad)
    with pytest.raises(UserError) as caught:
        read_questions(path, TableConfig())
    message = str(caught.value)
    assert message.startswith(f"{path}: data[0].paragraphs[0].qas[1]: ")
    assert said in message
    assert "\n" not in message
    reader, found = read_questions(path, SKIP)
    assert [one.id for one in found] == ["good"]
    assert reader.num_skipped == 1
    assert reader.first_skipped is not None
    assert said in reader.first_skipped


def test_places_in_lines_are_those_of_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", qa(), qa(id="1", question="Who?"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: the id '1' is that of .*a\.jsonl:1, too"):
        read_questions(path, TableConfig())
    path.write_text(path.read_text().splitlines()[0] + '\n{"id": "3", \n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: not valid JSON"):
        read_questions(path, TableConfig())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"data": [\n {"paragraphs": ]}', r"a\.json:2:17: not valid JSON"),
        (b'{"data": "paragraphs"}', r"a\.json: has no list 'data'"),
        (
            b'{"data": [{"paragraphs": [{"qas": 5}]}]}',
            r"data\[0\].paragraphs\[0\]: has no list 'qas",
        ),
        (b'{"data": [{"paragraphs": [\xff]}]}', r"a\.json: byte 26 of the file is not UTF-8"),
        (b'{"data": [{"paragraphs": []}]}', r"a\.json: has no questions to use"),
        (b'{"data": [{"paragraphs": [{"qas": [5]}]}]}', r"qas\[0\]: is no JSON object"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_its_place(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert form_of(path, is_asked=False) == "SQuAD JSON"
    with pytest.raises(UserError, match=said):
        read_questions(path, TableConfig())


@pytest.mark.parametrize(
    ("context", "said"), [(None, "no 'context'"), (" ", "the context is empty"), (4, "is no text")]
)
def test_a_bad_context_is_told_at_its_first_question(
    tmp_path: Path, context: Any, said: str
) -> None:
    path = squad(tmp_path / "a.json", qa(), context=context)
    with pytest.raises(UserError, match=rf"qas\[0\]: .*{said}"):
        read_questions(path, TableConfig())


def test_to_answer_no_answers_are_needed_nor_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", qa(answers=...))
    found = list(QuestionReader(path, TableConfig(), has_answers=False))
    assert found[0].answers == ()
    wrong = squad(tmp_path / "b.json", qa(answers=5))
    assert len(list(QuestionReader(wrong, TableConfig(), has_answers=False))) == 1
