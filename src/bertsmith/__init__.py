"""Train BERT-family encoders, from raw text to a model in use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.api.estimators import MultilabelClassifier, TextClassifier, TextRegressor

__version__ = "0.1.0"

__all__ = ["MultilabelClassifier", "TextClassifier", "TextRegressor", "__version__"]


def __getattr__(name: str) -> Any:
    """The estimators, with torch, once they are asked for: help and versions do not wait for it."""
    if name in __all__:
        return getattr(importlib.import_module("bertsmith.api.estimators"), name)
    raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
