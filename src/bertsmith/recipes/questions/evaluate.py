"""`bertsmith evaluate` of a model that finds answers."""

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from bertsmith.data.questions.files import read_questions
from bertsmith.data.questions.question import Question
from bertsmith.metrics.answers import JudgedQuestion, answer_metrics
from bertsmith.metrics.bootstrap import intervals
from bertsmith.recipes.config import EvaluateConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.predictions import check_output, whole_file
from bertsmith.recipes.questions.data import describe_skipped, encode_part, refuse_columns
from bertsmith.recipes.questions.task import open_answerer
from bertsmith.report.csv_cells import csv_cell
from bertsmith.tasks.questions import FoundAnswer, answers_of, judged, score_spans

AROUND_CHARACTERS = 60
"""Of the context, before and after the answer that is shown in it."""


def evaluate_answers(config: EvaluateConfig) -> Evaluation:
    """Score the answer to every question of a file.

    Raises:
        UserError: The model or the file cannot be used, or the mistakes cannot be written.
    """
    path = Path(config.data)
    refuse_columns(config.table)
    if config.errors is not None:
        check_output(
            Path(config.errors),
            overwrite=config.overwrite,
            source=path,
            option="errors",
            endings=(".csv",),
        )
    answerer = open_answerer(
        config.model,
        adapter=config.adapter,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    reader, table = read_questions(path, config.table)
    for line in describe_skipped(reader):
        print(line, file=sys.stderr)
    started_at_seconds = time.perf_counter()
    part = encode_part(table, answerer.tokenizer, path=path)
    found, nats_Q = answerer.find(part.windows, tokens_per_pack=config.tokens_per_pack)
    threshold = answerer.null_threshold
    if not answerer.is_ours and any(not one.answers for one in table):
        threshold = 0.0  # of a model from elsewhere none is known: whichever scores more
    scores = score_spans(found, part.windows, table)
    questions = judged(found, part.windows, table, scores, nats_Q=nats_Q, null_threshold=threshold)
    if config.errors is not None:
        said = answers_of(found, part.windows, table, null_threshold=threshold)
        _write_errors(config, table, questions, said)

    def scores_of(rows_N: Tensor) -> dict[str, float]:
        some = [questions[i] for i in rows_N.tolist()]
        return answer_metrics(some, null_threshold=threshold).by_name()

    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=answer_metrics(questions, null_threshold=threshold),
        intervals=intervals(
            scores_of, num_rows=len(table), num_samples=config.bootstrap, seed=config.seed
        )
        if config.bootstrap
        else {},
        num_cut=part.windows.num_cut,
        skipped_rows=reader.num_skipped,
        precision=answerer.compute.name,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _write_errors(
    config: EvaluateConfig,
    table: Sequence[Question],
    questions: Sequence[JudgedQuestion],
    said: Sequence[FoundAnswer],
) -> None:
    """Questions whose answer is not the given one to the letter, the lowest F1 first."""
    assert config.errors is not None
    wrong = [i for i, one in enumerate(questions) if one.score.exact_match < 1.0]
    wrong.sort(key=lambda i: (questions[i].score.f1, -questions[i].nats, i))
    with whole_file(Path(config.errors), option="errors") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "question", "prediction", "answers", "f1", "context"])
        for i in wrong[: config.errors_rows]:
            one = table[i]
            golds = list(dict.fromkeys(one.golds))
            cells = (
                one.id,
                one.question,
                said[i].text,
                golds[0] if len(golds) == 1 else golds or "",
                f"{questions[i].score.f1:.6g}",
                _excerpt(one, said[i]),
            )
            writer.writerow([csv_cell(c, escape_formulas=config.escape_formulas) for c in cells])


def _excerpt(one: Question, said: FoundAnswer) -> str:
    """The context around the first answer that was given, or around what is said."""
    start = one.answers[0].start if one.answers else said.start or 0
    length = len(one.answers[0].text) if one.answers else len(said.text)
    first, end = max(0, start - AROUND_CHARACTERS), start + length + AROUND_CHARACTERS
    before, after = "..." if first else "", "..." if end < len(one.context) else ""
    return before + one.context[first:end] + after
