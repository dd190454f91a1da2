"""The models of whole texts that fine-tuning trains, loaded for a task's tables."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.hf import load_classifier, load_encoder
from bertsmith.hf.stored_model import LoadReport
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.pair_objectives import Contrastive, CosineError
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.texts.tables import TaskTables

TextModel = SequenceClassifier | SentenceEmbedder


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """What overrides a checkpoint's dropout; None leaves it."""

    hidden: float | None = None
    attention: float | None = None


def load_text_model(
    where: Path, config: FinetuneConfig, tables: TaskTables, *, dropout: Dropout
) -> tuple[TextModel, LoadReport]:
    """The model of a checkpoint for a task; a head that it has not is new.

    Raises:
        UserError: It cannot be read, or pools in a way that bertsmith has not.
    """
    objective = tables.objective
    if isinstance(objective, Contrastive | CosineError):
        encoder, report = load_encoder(
            where,
            hidden_dropout_prob=dropout.hidden,
            attention_probs_dropout_prob=dropout.attention,
        )
        pooling = config.embedding.pooling
        assert pooling != "auto", "as_found says which"
        return SentenceEmbedder(encoder, pooling=pooling, objective=objective), report
    return load_classifier(
        where,
        labels=tables.labels,
        objective=objective,
        norm=config.head.norm,
        seed=config.seed,
        hidden_dropout_prob=dropout.hidden,
        attention_probs_dropout_prob=dropout.attention,
    )
