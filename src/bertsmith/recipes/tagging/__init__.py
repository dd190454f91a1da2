"""Token classification: what `finetune`, `evaluate` and `predict` do where each word has a tag."""
