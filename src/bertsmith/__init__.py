"""Train BERT-family encoders, from raw text to a model in use."""

__version__ = "0.1.0"
