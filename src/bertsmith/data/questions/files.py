"""Files of questions, read strictly: what cannot be used is an error with its place.

Read are SQuAD's JSON (versions 1.1 and 2.0), and JSONL or Parquet with a question a row.

Source:
    Rajpurkar et al. 2016 and 2018 (SQuAD); the layout of `answers` as two lists is that of the
    `datasets` library.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

from bertsmith.data.compressed import ending_of, open_bytes
from bertsmith.data.config import TableConfig
from bertsmith.data.questions.question import (
    Question,
    QuestionFaultError,
    read_answers,
    read_id,
    read_text,
)
from bertsmith.data.table_files import open_records
from bertsmith.data.tables import SKIP_HINT
from bertsmith.errors import UserError

QuestionForm = Literal["SQuAD JSON", "a question a row"]

ROW_ENDINGS = (".jsonl", ".ndjson", ".parquet")
KEYS = ("id", "question", "context", "answers", "is_impossible")
"""What is read of a row."""

PEEK_BYTES = 1 << 16
"""A SQuAD file says what it is among its first bytes."""

Item = tuple[str, Callable[[], Question]]
"""A place, and what makes the question that stands there, or tells why it cannot be used."""


def form_of(path: Path, *, is_asked: bool, has_answers: bool = True) -> QuestionForm | None:
    """How a file of questions is written; None if it is no such file.

    Args:
        path: The file.
        is_asked: Whether the user, or the model, says that it holds questions.
        has_answers: Whether it must hold answers, too.

    Raises:
        UserError: It cannot be read; or questions are asked for and it has none.
    """
    ending = ending_of(path)
    if ending == ".json" and (is_asked or _looks_like_squad(path)):
        return "SQuAD JSON"
    if ending in ROW_ENDINGS:
        records = open_records(path)
        with closing(records):
            names = {name.lower() for name in records.columns}
        wanted = {"question", "context"} | ({"answers"} if has_answers else set())
        if wanted <= names:
            return "a question a row"
    if is_asked:
        answers = ", `answers`" if has_answers else ""
        raise UserError(
            f"{path}: holds no questions on texts; give SQuAD's .json, or JSONL or Parquet with "
            f"`id`, `question`, `context`{answers}"
        )
    return None


def _looks_like_squad(path: Path) -> bool:
    with open_bytes(path) as file:
        head = file.read(PEEK_BYTES)
    return b'"paragraphs"' in head or (b'"qas"' in head and b'"question"' in head)


class QuestionReader:
    """The usable questions of a file, in its order; counts what it leaves out.

    One that cannot be used raises `UserError`, or is left out where the config says so.
    """

    def __init__(self, path: Path, config: TableConfig, *, has_answers: bool = True) -> None:
        """Nothing is read beyond what tells the file's form.

        Args:
            path: The file.
            config: Says what becomes of questions that cannot be used.
            has_answers: Whether answers are read; else they are passed over.

        Raises:
            UserError: The file cannot be read, or holds no questions.
        """
        self.path = path
        form = form_of(path, is_asked=True, has_answers=has_answers)
        assert form is not None, "or an error"
        self.form: QuestionForm = form
        self.num_skipped = 0
        self.first_skipped: str | None = None
        self._skips = config.bad_rows == "skip"
        self._has_answers = has_answers

    def __iter__(self) -> Iterator[Question]:
        for place, made in self.each():
            if isinstance(made, Question):
                yield made
                continue
            message = f"{place}: {made}"
            if not self._skips:
                raise UserError(f"{message}; {SKIP_HINT}")
            self.num_skipped += 1
            self.first_skipped = self.first_skipped or message

    def each(self) -> Iterator[tuple[str, Question | QuestionFaultError]]:
        """Every question's place, and the question or why it cannot be used.

        Raises:
            UserError: The file as a whole cannot be read.
        """
        places: dict[str, str] = {}
        for place, make in self._of_squad() if self.form == "SQuAD JSON" else self._of_rows():
            made: Question | QuestionFaultError
            try:
                made = make()
            except QuestionFaultError as fault:
                made = fault
            else:
                first = places.setdefault(made.id, place)
                if first != place:
                    said = f"the id {made.id!r} is that of {first}, too; ids must differ"
                    made = QuestionFaultError(said, "repeated")
            yield place, made

    def _of_squad(self) -> Iterator[Item]:
        articles = _object(read_json(self.path), "data", where=f"{self.path}")
        for a, article in enumerate(articles):
            at_article = f"{self.path}: data[{a}]"
            for p, paragraph in enumerate(_object(article, "paragraphs", where=at_article)):
                at_paragraph = f"{at_article}.paragraphs[{p}]"
                for q, content in enumerate(_object(paragraph, "qas", where=at_paragraph)):
                    place = f"{at_paragraph}.qas[{q}]"

                    def make(
                        content: object = content, above: object = paragraph, place: str = place
                    ) -> Question:
                        if not isinstance(content, dict) or not isinstance(above, dict):
                            raise QuestionFaultError("is no JSON object")
                        whole = {**content, "context": above.get("context")}
                        return question_of(
                            whole,
                            place,
                            usual_id=None,
                            has_answers=self._has_answers,
                            says_so=True,
                        )

                    yield place, make

    def _of_rows(self) -> Iterator[Item]:
        records = open_records(self.path)
        with closing(records):
            names = [name.lower() for name in records.columns]
            if twice := next((name for name in KEYS if names.count(name) > 1), None):
                raise UserError(
                    f"{self.path}: several columns could be {twice!r}, upper and lower case aside; "
                    "keep one of them"
                )
            for record in records.rows:
                place = f"{self.path}:{record.line or record.row}"
                content = dict(zip(names, record.values, strict=True))

                def make(
                    content: Mapping[str, object] = content,
                    place: str = place,
                    fault: str | None = record.fault,
                    row: int = record.row,
                ) -> Question:
                    if fault is not None:
                        raise QuestionFaultError(fault)
                    return question_of(
                        content, place, usual_id=str(row), has_answers=self._has_answers
                    )

                yield place, make


def question_of(
    content: Mapping[str, object],
    place: str,
    *,
    usual_id: str | None,
    has_answers: bool,
    says_so: bool = False,
) -> Question:
    """A question from its keys.

    Args:
        content: id, question, context, answers, is_impossible.
        place: Where it stands.
        usual_id: Its name if it has none; None: it must have one.
        has_answers: Whether answers are read.
        says_so: Whether a question without answers must say `is_impossible`.

    Raises:
        QuestionFaultError: It cannot be used.
    """
    name = read_id(content, usual_id)
    context = read_text(content, "context")
    return Question(
        id=name,
        place=place,
        question=read_text(content, "question"),
        context=context,
        answers=tuple(read_answers(content, context, says_so=says_so)) if has_answers else (),
    )


def read_questions(path: Path, config: TableConfig) -> tuple[QuestionReader, list[Question]]:
    """All questions of a file, with their answers, and the reader that counted.

    Raises:
        UserError: The file cannot be read, a question cannot be used, or none is left.
    """
    reader = QuestionReader(path, config)
    questions = list(reader)
    if not questions:
        skipped = f" ({reader.num_skipped:,} were skipped)" if reader.num_skipped else ""
        raise UserError(f"{path}: has no questions to use{skipped}")
    return reader, questions


def read_json(path: Path) -> object:
    """The content of a JSON file, packed or not.

    Raises:
        UserError: It cannot be read, or is no JSON in UTF-8; with line and column.
    """
    with open_bytes(path) as file:
        raw = file.read()
    try:
        with io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig") as text:
            return json.load(text)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} of the file is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON ({error.msg}); the file is "
            "broken or cut off"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


def _object(content: object, key: str, *, where: str) -> list[object]:
    """A list inside an object; what a SQuAD file is made of.

    Raises:
        UserError: It is not there.
    """
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise UserError(
            f"{where}: has no list {key!r}; SQuAD's form is data[].paragraphs[] with context and "
            "qas[] (questions a line go into a .jsonl file)"
        )
    return found
