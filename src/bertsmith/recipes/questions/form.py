"""Questions on texts as a form of data."""

from pathlib import Path
from typing import ClassVar

import torch

from bertsmith.batch import LabelledBatch
from bertsmith.checkpoint.state import RunState
from bertsmith.data.largest import largest_labelled
from bertsmith.hf import LoadReport, finds_answers, load_span_model
from bertsmith.hf.adapter import ANSWER_TASK
from bertsmith.model.span_model import NUM_ENDS, SpanModel
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.finetune_run import Aside
from bertsmith.recipes.form import Form
from bertsmith.recipes.predictions import PredictSummary
from bertsmith.recipes.questions.data import (
    QuestionData,
    as_answering,
    is_about_questions,
    open_questions,
)
from bertsmith.recipes.questions.evaluate import evaluate_answers
from bertsmith.recipes.questions.predict import predict_answers
from bertsmith.recipes.questions.run import QuestionRun
from bertsmith.recipes.training import Rig


class Questions(Form[SpanModel, QuestionData]):
    """An answer a question, which stands in a text."""

    row: ClassVar[str] = "question"
    done: ClassVar[str] = "answered"
    adapter_task: ClassVar[str] = ANSWER_TASK

    def is_asked(self, config: FinetuneConfig) -> bool:
        """As `--task` says, or the form of the data."""
        return is_about_questions(config)

    def open(self, config: FinetuneConfig, source: Path, *, at_once: int) -> QuestionData:
        """As `open_questions`."""
        return open_questions(config, source, at_once=at_once)

    def found_in(self, config: FinetuneConfig, data: QuestionData, source: Path) -> FinetuneConfig:
        """As `as_answering`."""
        return as_answering(config, data.tables.kind)

    def load(
        self, config: FinetuneConfig, data: QuestionData, folder: Path
    ) -> tuple[SpanModel, LoadReport]:
        """With the folder's own head if it has one for this."""
        return load_span_model(
            folder,
            seed=config.seed,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        )

    def run(
        self,
        config: FinetuneConfig,
        rig: Rig,
        model: SpanModel,
        data: QuestionData,
        state: RunState,
        *,
        aside: Aside,
    ) -> QuestionRun:
        """Judged by all questions."""
        return QuestionRun(config, rig, model, data, state, aside=aside)

    def largest(self, data: QuestionData, *, tokens: int) -> LabelledBatch:
        """As `largest_labelled`, without an answer in it: [CLS] is in a window of any length."""
        return largest_labelled(
            data.train.examples,
            torch.zeros(1, NUM_ENDS, dtype=torch.int64),
            tokens=tokens,
            longest=data.longest_example,
        )

    def num_outputs(self, data: QuestionData) -> int:
        """A token's two scores."""
        return NUM_ENDS

    def is_of(self, folder: Path) -> bool:
        """Whether the model finds answers."""
        return finds_answers(folder)

    def evaluate(self, config: EvaluateConfig) -> Evaluation:
        """As `evaluate_answers`."""
        return evaluate_answers(config)

    def predict(self, config: PredictConfig) -> PredictSummary:
        """As `predict_answers`."""
        return predict_answers(config)
