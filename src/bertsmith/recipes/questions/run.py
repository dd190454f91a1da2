"""A fine-tuning run whose model finds answers."""

from collections.abc import Mapping
from pathlib import Path

import torch

from bertsmith.data.examples import labelled_batch, packs_by_length
from bertsmith.errors import UserError
from bertsmith.hf import load_span_model
from bertsmith.metrics import Metrics
from bertsmith.metrics.answers import answer_metrics
from bertsmith.model.span_model import SpanModel
from bertsmith.parallel.world import dealt
from bertsmith.recipes.finetune_run import FinetuneRun
from bertsmith.recipes.questions.data import QuestionData
from bertsmith.recipes.questions.task import (
    NUM_COLUMNS,
    AnswerTask,
    found_in_windows,
    read_answer_task,
    scan_pack,
)
from bertsmith.tasks.questions import judged, score_spans, tuned_threshold

USE = """```
bertsmith predict --model model --data questions.jsonl --output answers.jsonl
```

with lines such as

```
{"id": "1", "question": "Who came?", "context": "A man came. He was old."}
```

In `transformers` the model is an `AutoModelForQuestionAnswering`."""


class QuestionRun(FinetuneRun[SpanModel, QuestionData]):
    """Judges by the answer to every question of the dev part; a row of a step is a window."""

    hub_task = "question-answering"
    _null_threshold: float | None = None
    """As it was best when the model was judged last."""

    @property
    def use(self) -> str:
        """By bertsmith: transformers 5 has no pipeline for it."""
        return USE

    def place_of(self, row: int) -> str:
        """File and line of an example to learn from."""
        return self._data.train.table[row].place

    def new_model(self, folder: Path) -> SpanModel:
        """The model of a folder, with the run's head."""
        return load_span_model(folder, seed=self._config.seed)[0]

    def read_best(self) -> AnswerTask | None:
        """What stands beside the best weights."""
        return read_answer_task(self._folder / "model")

    def judge(self, max_tokens: int | None) -> Metrics:
        """Scores of every question of the dev part, each window on one rank; nothing is drawn.

        When no answer is said is decided anew, as is best for F1.
        """
        dev = self._data.dev
        examples, windows = dev.examples, dev.windows
        packs = packs_by_length(
            examples.lengths_N,
            range(len(examples)),
            tokens_per_pack=max_tokens or self._config.tokens_per_pack,
        )
        scans_R6 = torch.zeros(len(examples), NUM_COLUMNS, dtype=torch.float64)
        for number, rows in dealt(packs, self._world, stop_asked=self.stop_asked):
            self._world.beat("the judging")
            batch = labelled_batch(examples, dev.places_R2, rows)
            found_R6 = scan_pack(
                self._model,
                batch,
                windows.contexts_R[batch.rows_N],
                max_answer_tokens=self._config.answer.max_tokens,
                compute=self._compute,
            )
            if number is not None:
                scans_R6[batch.rows_N] = found_R6
        scans_R6 = self._world.sum_tensor(scans_R6)
        try:
            found, nats_Q = found_in_windows(scans_R6, windows)
        except FloatingPointError as error:
            raise UserError(
                f"after step {self.state.step:,} the model gives scores that are not finite; "
                "the best model so far stands; try a lower --optim.learning_rate"
            ) from error
        scores = score_spans(found, windows, dev.table)
        if self._data.tables.kind.has_impossible:
            self._null_threshold = tuned_threshold(found, scores, dev.table)
        questions = judged(
            found,
            windows,
            dev.table,
            scores,
            nats_Q=nats_Q,
            null_threshold=self._null_threshold,
        )
        return answer_metrics(questions, null_threshold=self._null_threshold)

    def write_task(self, folder: Path, step: int, *, scores: Mapping[str, float]) -> None:
        """How the model was trained to read and to answer."""
        threshold = self._null_threshold
        if threshold is None and self._data.tables.kind.has_impossible:
            threshold = 0.0  # not judged yet: whichever scores more
        AnswerTask(
            max_sequence_tokens=self._data.longest,
            overlap_tokens=self._data.overlap_tokens,
            max_answer_tokens=self._config.answer.max_tokens,
            null_threshold=threshold,
            step=step,
            scores=scores,
        ).write(folder)
