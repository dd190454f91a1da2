"""Train BERT-family encoders, from raw text to a model in use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.api.estimators import MultilabelClassifier, TextClassifier, TextRegressor
    from bertsmith.api.question_answerer import QuestionAnswerer

__version__ = "0.1.0"

_PLACES = {
    "MultilabelClassifier": "estimators",
    "QuestionAnswerer": "question_answerer",
    "TextClassifier": "estimators",
    "TextRegressor": "estimators",
}
"""The files of `api` that the names imported late come from."""

__all__ = [
    "MultilabelClassifier",
    "QuestionAnswerer",
    "TextClassifier",
    "TextRegressor",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The estimators, with torch, once they are asked for: help and versions do not wait for it."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"bertsmith.api.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
