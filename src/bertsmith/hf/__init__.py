"""Hugging Face folders, in and out: the only room that knows their names and file formats.

`load_*` read a folder or a hub name, `save_model` and `write_model_files` write one that
`transformers` loads unchanged. Nothing that is read may execute, and nothing is loaded in part
without being said.
"""

from bertsmith.hf.config_json import parse_config, read_config, read_labels
from bertsmith.hf.hub import resolve
from bertsmith.hf.load import (
    check_vocabulary,
    load_classifier,
    load_encoder,
    load_masked_lm,
)
from bertsmith.hf.save import TOKENIZER_FILES, recover_model, save_model, write_model_files
from bertsmith.hf.stored_model import LoadReport

__all__ = [
    "TOKENIZER_FILES",
    "LoadReport",
    "check_vocabulary",
    "load_classifier",
    "load_encoder",
    "load_masked_lm",
    "parse_config",
    "read_config",
    "read_labels",
    "recover_model",
    "resolve",
    "save_model",
    "write_model_files",
]
