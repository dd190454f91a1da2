"""Rows of text as a form of data: with labels or numbers, and as pairs to embed."""

from pathlib import Path
from typing import ClassVar

from bertsmith.batch import LabelledBatch
from bertsmith.checkpoint.state import RunState
from bertsmith.data.largest import largest_labelled
from bertsmith.hf import LoadReport
from bertsmith.hf.adapter import EMBEDDING_TASK
from bertsmith.hf.sentence import read_pooling
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.finetune_run import Aside
from bertsmith.recipes.form import Form
from bertsmith.recipes.predictions import PredictSummary
from bertsmith.recipes.texts.data import TaskData, open_task
from bertsmith.recipes.texts.embed import predict_embeddings
from bertsmith.recipes.texts.evaluate import evaluate_classifier, evaluate_embedder
from bertsmith.recipes.texts.model import Dropout, TextModel, load_text_model
from bertsmith.recipes.texts.predict import predict_labels
from bertsmith.recipes.texts.run import TextRun
from bertsmith.recipes.texts.tables import as_found
from bertsmith.recipes.training import Rig


class Texts(Form[TextModel, TaskData]):
    """Labels or a number for each row."""

    def is_asked(self, config: FinetuneConfig) -> bool:
        """What no other form takes."""
        return True

    def open(self, config: FinetuneConfig, source: Path, *, at_once: int) -> TaskData:
        """As `open_task`."""
        return open_task(config, source, at_once=at_once)

    def found_in(self, config: FinetuneConfig, data: TaskData, source: Path) -> FinetuneConfig:
        """As `as_found`."""
        return as_found(config, data.tables.kind, source)

    def load(
        self, config: FinetuneConfig, data: TaskData, folder: Path
    ) -> tuple[TextModel, LoadReport]:
        """With a head for the data's labels, or none for embeddings."""
        dropout = Dropout(
            hidden=config.hidden_dropout_prob, attention=config.attention_probs_dropout_prob
        )
        return load_text_model(folder, config, data.tables, dropout=dropout)

    def run(
        self,
        config: FinetuneConfig,
        rig: Rig,
        model: TextModel,
        data: TaskData,
        state: RunState,
        *,
        aside: Aside,
    ) -> TextRun:
        """Judged by all rows."""
        return TextRun(config, rig, model, data, state, aside=aside)

    def largest(self, data: TaskData, *, tokens: int) -> LabelledBatch:
        """As `largest_labelled`, as a step of its own."""
        part = data.train
        return data.steps.alone(
            largest_labelled(
                part.examples, part.targets_W, tokens=tokens, longest=data.longest_example
            )
        )

    def reads_all(self, data: TaskData) -> bool:
        """The first token alone."""
        return False

    def is_of(self, folder: Path) -> bool:
        """What no other form takes."""
        return True

    def evaluate(self, config: EvaluateConfig) -> Evaluation:
        """As `evaluate_classifier`."""
        return evaluate_classifier(config)

    def predict(self, config: PredictConfig) -> PredictSummary:
        """As `predict_labels`."""
        return predict_labels(config)


class Embeddings(Texts):
    """Pairs whose texts become vectors: as texts in training, on its own in use."""

    done: ClassVar[str] = "embedded"
    adapter_task: ClassVar[str] = EMBEDDING_TASK

    def is_asked(self, config: FinetuneConfig) -> bool:
        """No data shows it."""
        return config.task == "embedding"

    def reads_all(self, data: TaskData) -> bool:
        """A mean is of all tokens."""
        return True

    def is_of(self, folder: Path) -> bool:
        """Whether the folder says how a text's vector is made."""
        return read_pooling(folder) is not None

    def evaluate(self, config: EvaluateConfig) -> Evaluation:
        """As `evaluate_embedder`."""
        return evaluate_embedder(config)

    def predict(self, config: PredictConfig) -> PredictSummary:
        """As `predict_embeddings`."""
        return predict_embeddings(config)
