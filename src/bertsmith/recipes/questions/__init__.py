"""Fine-tuning, evaluation and prediction of answers that stand in a text."""
