"""`bertsmith predict` of a model that finds answers: a JSON object a question, or SQuAD's form.

Questions are taken in chunks, in the file's order; of a JSONL file memory is bounded by a chunk.
"""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from bertsmith.data.questions.files import QuestionReader
from bertsmith.data.questions.question import Question
from bertsmith.errors import UserError
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.model_folder import sole_adapter
from bertsmith.recipes.predictions import PredictSummary, check_output, whole_file
from bertsmith.recipes.questions.data import refuse_columns
from bertsmith.recipes.questions.task import open_answerer
from bertsmith.tasks.questions import FoundAnswer

QUESTIONS_AT_ONCE = 1024

Write = Callable[[Question, FoundAnswer], None]


def predict_answers(config: PredictConfig) -> PredictSummary:
    """Answer every question and write what is said.

    Raises:
        UserError: The model, the file or the output cannot be used.
    """
    source, output = Path(config.data), Path(config.output)
    refuse_columns(config.table)
    if config.data == "-":
        raise UserError("--data: questions come from a file (.json, .jsonl or .parquet); name one")
    check_output(output, overwrite=config.overwrite, source=source, endings=(".jsonl", ".json"))
    answerer = open_answerer(
        config.model,
        adapter=sole_adapter(config.adapter),
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    reader = QuestionReader(source, config.table, has_answers=False)
    num_rows, num_cut, started_at_seconds = 0, 0, time.perf_counter()
    with _output(output) as write:
        for some in ahead(_chunks(reader)):
            said, cut_here = answerer.answer(some, tokens_per_pack=config.tokens_per_pack)
            for question, answer in zip(some, said, strict=True):
                write(question, answer)
            num_rows += len(some)
            num_cut += cut_here
    return PredictSummary(
        num_rows=num_rows,
        num_cut=num_cut,
        skipped_rows=reader.num_skipped,
        seconds=time.perf_counter() - started_at_seconds,
    )


def as_row(question: Question, answer: FoundAnswer) -> dict[str, object]:
    """What is written of a question. `start` and `end` count characters of the context."""
    row: dict[str, object] = {
        "id": question.id,
        "question": question.question,
        "answer": answer.text,
        "start": answer.start,
        "end": answer.end,
        "score": float(f"{answer.score:.6g}"),
    }
    if answer.no_answer is not None:
        row["no_answer"] = float(f"{answer.no_answer:.6g}")
    return row


def _chunks(reader: QuestionReader) -> Iterator[list[Question]]:
    questions = iter(reader)
    while some := list(itertools.islice(questions, QUESTIONS_AT_ONCE)):
        yield some


@contextlib.contextmanager
def _output(path: Path) -> Iterator[Write]:
    if str(path) == "-":
        yield _lines(sys.stdout)
        sys.stdout.flush()
        return
    with whole_file(path, option="output") as file:
        if path.suffix.lower() == ".jsonl":
            yield _lines(file)
            return
        file.write("{")
        yield _by_id(file)
        file.write("\n}\n")


def _lines(file: TextIO) -> Write:
    def write(question: Question, answer: FoundAnswer) -> None:
        file.write(json.dumps(as_row(question, answer), ensure_ascii=False) + "\n")

    return write


def _by_id(file: TextIO) -> Write:
    """The text of each answer by the question's id, as SQuAD's scripts read it."""
    between = "\n"

    def write(question: Question, answer: FoundAnswer) -> None:
        nonlocal between
        pair = (json.dumps(text, ensure_ascii=False) for text in (question.id, answer.text))
        file.write(between + ": ".join(pair))
        between = ",\n"

    return write
