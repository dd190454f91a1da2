"""`head.safetensors`: the head of a classifier with a norm, as it is trained.

`BertForSequenceClassification` has no norm before its classifier. A batch norm is affine in
inference: `model.safetensors` holds it folded into the classifier, and gives the same scores.
A layer norm is not: `model.safetensors` holds no classifier, and `config.json` says a model type
that `transformers` refuses. Either way the true parts stand in this file, under our names, and
training goes on from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.hf.config_json import is_own_model_type
from bertsmith.hf.keys import HEAD_NORM
from bertsmith.hf.weights import StoredTensor, open_safetensors, read_metadata, write_weights
from bertsmith.model.config import HeadNorm
from bertsmith.model.head_norm import BatchNorm, fold
from bertsmith.model.heads import SequenceClassifier

HEAD_FILE = "head.safetensors"

FOLD_BOUND = 1e-5
"""Largest difference, as a share of the largest value, of a fold that was made elsewhere."""

_CLASSIFIER = "classifier."


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHead:
    """A head file, its tensors not read yet."""

    file: Path
    norm: HeadNorm
    """batch or layer."""

    tensors: Sequence[StoredTensor]
    """Of norm and classifier, under our names."""


def write_head(folder: Path, model: SequenceClassifier) -> None:
    """Write the head file of a model with a norm into a folder.

    Raises:
        OSError: The disk is full or forbids it.
    """
    tensors = [
        (name, values)
        for name, values in (*model.named_parameters(), *model.named_buffers())
        if name.startswith((HEAD_NORM, _CLASSIFIER))
    ]
    write_weights(folder / HEAD_FILE, tensors, metadata={"norm": model.norm_kind})


def open_head(folder: Path) -> StoredHead | None:
    """The head file of a model folder; None where the classifier has no norm.

    Raises:
        UserError: It is damaged, missing, or of another model than `config.json`.
    """
    file, is_own = folder / HEAD_FILE, is_own_model_type(folder)
    if not file.exists():
        if is_own:
            raise UserError(
                f"{file}: missing, though config.json says that the head has a norm; copy the "
                "whole folder again"
            )
        return None
    norm, tensors = read_metadata(file).get("norm"), open_safetensors(file)
    strange = [t.name for t in tensors if not t.name.startswith((HEAD_NORM, _CLASSIFIER))]
    if norm not in ("batch", "layer") or strange:
        raise UserError(
            f"{file}: is no head that bertsmith wrote; delete it to use the classifier in "
            "model.safetensors"
        )
    if (norm == "layer") != is_own:
        raise UserError(_stale(file, "config.json"))
    return StoredHead(file=file, norm=cast(HeadNorm, norm), tensors=tensors)


def parameters_for_transformers(model: SequenceClassifier) -> dict[str, Tensor]:
    """What `model.safetensors` holds of a classifier, under our names.

    All of it without a norm; with a batch norm the folded classifier, in float64; with a layer
    norm no classifier.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    norm = model.head_norm
    if norm is None:
        return parameters
    kept = {
        name: values
        for name, values in parameters.items()
        if not name.startswith((HEAD_NORM, _CLASSIFIER))
    }
    if isinstance(norm, BatchNorm):
        kept["classifier.weight"], kept["classifier.bias"] = fold(norm, model.classifier)
    return kept


def check_fold(
    head: StoredHead, model: SequenceClassifier, plain: Mapping[str, StoredTensor]
) -> None:
    """Refuse a head file that says something else than the weights beside it.

    So it is when another program has trained the model on: it writes `model.safetensors` and
    leaves the head file, which would then undo its work.

    Args:
        head: Where `model` has its head from; with a batch norm.
        model: The loaded model.
        plain: The classifier of `model.safetensors`, under our names.

    Raises:
        UserError: They differ.
    """
    for name, folded in parameters_for_transformers(model).items():
        if not name.startswith(_CLASSIFIER):
            continue
        stored = plain.get(name)
        if stored is None or stored.shape != tuple(folded.shape):
            raise UserError(_stale(head.file, "model.safetensors"))
        error = (stored.read_float32().double() - folded).abs().max()
        if float(error) > FOLD_BOUND * float(folded.abs().max()):
            raise UserError(_stale(head.file, "model.safetensors"))


def _stale(file: Path, other: str) -> str:
    return (
        f"{file}: does not belong to the {other} beside it, which another program may have "
        "written; delete it to use the classifier in model.safetensors"
    )
