"""Train BERT-family encoders, from raw text to a model in use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.api.answerers import QuestionAnswerer
    from bertsmith.api.embedders import SentenceEmbedder
    from bertsmith.api.taggers import WordTagger
    from bertsmith.api.texts import MultilabelClassifier, TextClassifier, TextRegressor

__version__ = "0.1.0"

_HOMES = {
    "MultilabelClassifier": "texts",
    "QuestionAnswerer": "answerers",
    "SentenceEmbedder": "embedders",
    "TextClassifier": "texts",
    "TextRegressor": "texts",
    "WordTagger": "taggers",
}

__all__ = [
    "MultilabelClassifier",
    "QuestionAnswerer",
    "SentenceEmbedder",
    "TextClassifier",
    "TextRegressor",
    "WordTagger",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The estimators, with torch, once they are asked for: help and versions do not wait for it."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"bertsmith.api.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
