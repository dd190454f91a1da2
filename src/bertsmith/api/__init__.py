"""Fine-tuning as Python programs expect it: objects with `fit` and `predict`."""
