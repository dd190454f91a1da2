"""Tagged words as a form of data."""

from pathlib import Path
from typing import ClassVar

from bertsmith.batch import MaskedBatch
from bertsmith.checkpoint.state import RunState
from bertsmith.data.tagging.windows import largest_tagged
from bertsmith.hf import LoadReport, load_token_classifier, tags_tokens
from bertsmith.hf.adapter import TOKEN_TASK
from bertsmith.model.token_classifier import TokenClassifier
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.finetune_run import Aside
from bertsmith.recipes.form import Form
from bertsmith.recipes.predictions import PredictSummary
from bertsmith.recipes.tagging.data import TaggingData, as_tagging, is_tagging, open_tagging
from bertsmith.recipes.tagging.evaluate import evaluate_tagger
from bertsmith.recipes.tagging.predict import predict_tags
from bertsmith.recipes.tagging.run import TaggingRun
from bertsmith.recipes.training import Rig


class Tags(Form[TokenClassifier, TaggingData]):
    """A tag a word."""

    adapter_task: ClassVar[str] = TOKEN_TASK

    def is_asked(self, config: FinetuneConfig) -> bool:
        """As `--task` says, or the form of the data."""
        return is_tagging(config)

    def open(self, config: FinetuneConfig, source: Path, *, at_once: int) -> TaggingData:
        """As `open_tagging`."""
        return open_tagging(config, source, at_once=at_once)

    def found_in(self, config: FinetuneConfig, data: TaggingData, source: Path) -> FinetuneConfig:
        """As `as_tagging`."""
        return as_tagging(config, data.tables.kind)

    def load(
        self, config: FinetuneConfig, data: TaggingData, folder: Path
    ) -> tuple[TokenClassifier, LoadReport]:
        """With a head for the data's tags."""
        return load_token_classifier(
            folder,
            labels=data.tables.labels,
            objective=data.tables.objective,
            seed=config.seed,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        )

    def run(
        self,
        config: FinetuneConfig,
        rig: Rig,
        model: TokenClassifier,
        data: TaggingData,
        state: RunState,
        *,
        aside: Aside,
    ) -> TaggingRun:
        """Judged by all words."""
        return TaggingRun(config, rig, model, data, state, aside=aside)

    def largest(self, data: TaggingData, *, tokens: int) -> MaskedBatch:
        """As `largest_tagged`."""
        part = data.train
        return largest_tagged(
            part.windows, part.tags_W, tokens=tokens, longest=data.longest_example
        )

    def is_of(self, folder: Path) -> bool:
        """Whether the model tags words."""
        return tags_tokens(folder)

    def evaluate(self, config: EvaluateConfig) -> Evaluation:
        """As `evaluate_tagger`."""
        return evaluate_tagger(config)

    def predict(self, config: PredictConfig) -> PredictSummary:
        """As `predict_tags`."""
        return predict_tags(config)
