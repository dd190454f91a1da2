"""Hugging Face folders, in and out: the only room that knows their names and file formats.

`load_*` read a folder or a hub name, `save_model` and `write_model_files` write one that
`transformers` loads unchanged. Nothing that is read may execute, and nothing is loaded in part
without being said.

What reads a config alone needs no torch, so the rest is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bertsmith.hf.config_json import (
    finds_answers,
    parse_config,
    read_config,
    read_labels,
    tags_tokens,
)

if TYPE_CHECKING:
    from bertsmith.hf.hub import resolve
    from bertsmith.hf.load import (
        check_vocabulary,
        load_classifier,
        load_encoder,
        load_masked_lm,
        load_paired_lm,
        load_span_model,
        load_token_classifier,
    )
    from bertsmith.hf.save import TOKENIZER_FILES, recover_model, save_model, write_model_files
    from bertsmith.hf.stored_model import LoadReport

_PLACES = {
    "resolve": "hub",
    "check_vocabulary": "load",
    "load_classifier": "load",
    "load_encoder": "load",
    "load_masked_lm": "load",
    "load_paired_lm": "load",
    "load_span_model": "load",
    "load_token_classifier": "load",
    "TOKENIZER_FILES": "save",
    "recover_model": "save",
    "save_model": "save",
    "write_model_files": "save",
    "LoadReport": "stored_model",
}
"""The files that the names imported late come from."""

__all__ = [
    "TOKENIZER_FILES",
    "LoadReport",
    "check_vocabulary",
    "finds_answers",
    "load_classifier",
    "load_encoder",
    "load_masked_lm",
    "load_paired_lm",
    "load_span_model",
    "load_token_classifier",
    "parse_config",
    "read_config",
    "read_labels",
    "recover_model",
    "resolve",
    "save_model",
    "tags_tokens",
    "write_model_files",
]


def __getattr__(name: str) -> Any:
    """A name from a file that needs torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
