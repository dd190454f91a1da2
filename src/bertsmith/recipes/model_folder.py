"""Folders of models and adapters as a user names them, and what has to fit in them."""

from collections.abc import Sequence
from pathlib import Path

from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer
from bertsmith.errors import UserError
from bertsmith.hf import check_vocabulary, resolve
from bertsmith.hf.adapter import ADAPTER_CONFIG
from bertsmith.hf.config_json import model_part
from bertsmith.model.config import EncoderConfig


def model_folder(where: str) -> Path:
    """The folder of a model: itself, the `model/` of a run folder, or a hub name's download."""
    part = model_part(Path(where))
    return resolve(where) if part == Path(where) else part


def found_folder(where: str) -> Path | None:
    """As `model_folder`; None where that refuses, which whoever opens the model will then do."""
    try:
        return model_folder(where)
    except UserError:
        return None


def adapter_folder(where: str) -> Path:
    """The folder of an adapter: itself, or the `adapter/` of a run folder."""
    inner = Path(where) / "adapter"
    if not (Path(where) / ADAPTER_CONFIG).exists() and (inner / ADAPTER_CONFIG).exists():
        return inner
    return Path(where)


def sole_adapter(adapters: Sequence[str]) -> str | None:
    """The adapter of a model that takes one at a time; None without.

    Raises:
        UserError: There are more.
    """
    if len(adapters) > 1:
        raise UserError(
            f"--adapter: {len(adapters)} are given; several at once are for classifiers of texts, "
            "of tags, answers and embeddings give one"
        )
    return adapters[0] if adapters else None


def longest_example(asked: int | None, limit: int, *, is_pair: bool) -> int:
    """Most tokens of an example.

    Args:
        asked: By the user; None: as many as the model takes.
        limit: Positions of the model.
        is_pair: Whether an example holds two texts.

    Raises:
        UserError: More than the model has positions, or no room for a token of each text.
    """
    least = 5 if is_pair else 3
    if asked is None:
        return limit
    if not least <= asked <= limit:
        raise UserError(
            f"--max_sequence_tokens {asked}: must be from {least} to {limit}, the positions of "
            "the model"
        )
    return asked


def fitting_tokenizer(folder: Path, shape: EncoderConfig) -> TextTokenizer:
    """The tokenizer that came with a model, checked against it.

    Raises:
        UserError: It is missing or damaged, gives ids beyond the model's vocabulary, or does not
            put BERT's two special tokens around a text.
    """
    loaded = load_tokenizer(folder)
    check_vocabulary(shape, num_tokens=loaded.vocab.size, where=str(folder))
    frame = loaded.tokenizer.encode("").ids
    if frame != [loaded.vocab.cls_id, loaded.vocab.sep_id]:
        raise UserError(
            f"{folder}: its tokenizer puts {loaded.tokenizer.encode('').tokens} around a text "
            "where BERT needs a first and a last special token; use the model's own tokenizer"
        )
    return loaded
