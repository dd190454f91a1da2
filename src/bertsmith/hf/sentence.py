"""What makes a model folder one for sentence-transformers: which modules follow each other.

Source: the folders that sentence-transformers reads, in the form that its versions from 2 on know.
"""

import json
from pathlib import Path
from typing import Any, cast, get_args

from bertsmith.errors import UserError
from bertsmith.model.config import Pooling

MODULES_FILE = "modules.json"

_POOLING_FOLDER = "1_Pooling"
_NORMALIZE_FOLDER = "2_Normalize"
_MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write_sentence_files(
    folder: Path, *, pooling: Pooling, width: int, max_sequence_tokens: int
) -> None:
    """Put the files beside an encoder's.

    Args:
        folder: Holds config.json, weights and tokenizer.
        pooling: mean or cls.
        width: Numbers of an embedding.
        max_sequence_tokens: Longer texts are cut.
    """
    modules = [("", "Transformer"), (_POOLING_FOLDER, "Pooling"), (_NORMALIZE_FOLDER, "Normalize")]
    _write(
        folder / MODULES_FILE,
        [
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.models.{name}",
            }
            for number, (path, name) in enumerate(modules)
        ],
    )
    for name in (_POOLING_FOLDER, _NORMALIZE_FOLDER):
        (folder / name).mkdir(exist_ok=True)
    modes = {key: pooling == name for name, key in _MODES.items()}
    _write(folder / _POOLING_FOLDER / "config.json", {"word_embedding_dimension": width, **modes})
    _write(folder / _NORMALIZE_FOLDER / "config.json", {})
    _write(
        folder / "sentence_bert_config.json",
        {"max_seq_length": max_sequence_tokens, "do_lower_case": False},
    )
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def read_pooling(folder: Path) -> Pooling | None:
    """How a folder's embeddings are made; None if it is not one for sentence-transformers.

    Raises:
        UserError: In a way that bertsmith does not have.
    """
    if not (folder / MODULES_FILE).exists():
        return None
    modules = _read(folder / MODULES_FILE)
    names = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / MODULES_FILE}: its modules are {', '.join(names)}; bertsmith reads "
            "Transformer, Pooling and Normalize"
        )
    file = folder / str(modules[1].get("path")) / "config.json"
    config = _read(file)
    given = config.get("pooling_mode")
    modes = {given} if given else {key for key, is_on in config.items() if "mode" in key and is_on}
    for name in get_args(Pooling):
        if modes in ({name}, {_MODES[name]}):
            return cast(Pooling, name)
    raise UserError(
        f"{file}: pools by {', '.join(map(str, sorted(modes)))}; bertsmith by mean or cls"
    )


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({str(error)[:100]})") from None
