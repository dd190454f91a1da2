"""Write a model as a Hugging Face folder."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from bertsmith.durable import why_not_written, write_folder
from bertsmith.errors import UserError
from bertsmith.hf.config_json import CONFIG_NAME, SINGLE_LABEL, Task, config_json
from bertsmith.hf.head import HEAD_FILE, parameters_for_transformers, write_head
from bertsmith.hf.keys import to_hf
from bertsmith.hf.weights import SAFETENSORS, write_weights
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLM, PairedLM, SequenceClassifier
from bertsmith.model.span_model import SpanModel
from bertsmith.model.token_classifier import TokenClassifier

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)
"""What a tokenizer folder may hold; only the first is needed."""

Model = Encoder | MaskedLM | SequenceClassifier | SentenceEmbedder | TokenClassifier | SpanModel


def write_model_files(
    folder: Path,
    model: Model,
    *,
    tokenizer_folder: Path | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into an existing folder.

    In place and without fsync: for a caller that owns the folder and renames it when all of it
    is written (`save_model`, the checkpoints). The decoder's weight is the token embedding and
    is stored once; `transformers` ties it again on loading. A classifier with a norm also gets its
    head file (`hf.head`).

    Args:
        folder: Where to write.
        model: Its weights are stored in fp32.
        tokenizer_folder: Folder whose `TOKENIZER_FILES` are copied along.
        labels: Names of a classifier's classes, in the order of their ids.
    """
    if isinstance(model, SentenceEmbedder):  # beside the encoder it has nothing of its own
        model, labels = model.encoder, None
    if isinstance(model, SpanModel):  # its two scores have no names
        labels = None
    encoder = model if isinstance(model, Encoder) else model.encoder
    prefix = "encoder." if isinstance(model, Encoder) else ""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    fits_transformers, problem_type = True, SINGLE_LABEL
    written = [SAFETENSORS]
    if isinstance(model, SequenceClassifier):
        assert len(labels or ()) == model.classifier.out_features, "one name for each class"
        parameters = parameters_for_transformers(model)
        fits_transformers = model.norm_kind != "layer"
        problem_type = model.objective.problem_type
        if model.norm_kind != "none":
            write_head(folder, model)
            written.append(HEAD_FILE)
    tensors = []
    for name, parameter in parameters.items():
        names = to_hf(prefix + name)
        tensors += list(zip(names, parameter.detach().chunk(len(names)), strict=True))
    text = config_json(
        encoder.config,
        task=_task_of(model),
        labels=labels,
        problem_type=problem_type,
        fits_transformers=fits_transformers,
    )
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    write_weights(folder / SAFETENSORS, tensors)
    for name in written:
        # safetensors writes for the owner alone; a model is for whoever may read the folder.
        shutil.copymode(folder / CONFIG_NAME, folder / name)
    if tokenizer_folder is not None:
        for name in TOKENIZER_FILES:
            if name == TOKENIZER_FILES[0] or (tokenizer_folder / name).exists():
                shutil.copyfile(tokenizer_folder / name, folder / name)


def save_model(
    folder: Path,
    model: nn.Module,
    *,
    tokenizer_folder: Path | None = None,
    labels: Sequence[str] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a model folder that is there whole or not at all, replacing one that is there.

    Written beside its place under a temporary name, flushed to disk, then renamed. `write_more`
    may add files to the folder that it is given before that.

    Raises:
        UserError: The folder cannot be written.
    """
    assert isinstance(model, Model)
    folder = folder.absolute()

    def write(fresh: Path) -> None:
        write_model_files(fresh, model, tokenizer_folder=tokenizer_folder, labels=labels)
        if write_more is not None:
            write_more(fresh)

    try:
        recover_model(folder)
        write_folder(
            folder,
            fresh=folder.with_name(f".{folder.name}.new-{os.getpid()}"),
            aside=folder.with_name(f".{folder.name}.old-{os.getpid()}"),
            write=write,
        )
    except OSError as error:
        size_bytes = sum(p.numel() * 4 for p in model.parameters())
        reason = why_not_written(error, folder, needed_bytes=size_bytes)
        raise UserError(f"{folder}: cannot be written ({reason})") from error


def recover_model(folder: Path) -> None:
    """Put a model back that a process killed between two renames left beside its place.

    What else killed processes left of it is deleted.
    """
    left = folder.parent.glob(f".{folder.name}.old-*")
    for stale in sorted(left, key=lambda path: path.stat().st_mtime, reverse=True):
        if folder.exists():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.rename(folder)
    for fresh in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(fresh, ignore_errors=True)


def _task_of(model: Model) -> Task:
    match model:
        case PairedLM():
            return "paired_lm"
        case MaskedLM():
            return "masked_lm"
        case SequenceClassifier():
            return "classifier"
        case TokenClassifier():
            return "token_classifier"
        case SpanModel():
            return "span_model"
        case Encoder() | SentenceEmbedder():
            return "encoder"
