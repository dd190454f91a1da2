"""Adapters written in PEFT's file format, and as a run's checkpoints keep them.

    adapter/adapter_config.json        PEFT's, version 0.18 and later read what stands here
            adapter_model.safetensors  A and B by Hugging Face's names, and the head that goes along
            bertsmith_adapter.json     which base the adapter is for, and its labels

Nothing of `peft` is imported: the format is its documented one (PEFT docs, "PEFT checkpoint
format"). It is read in `stored_adapter`.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.hf.config_json import CONFIG_NAME
from bertsmith.hf.keys import to_hf
from bertsmith.hf.weights import open_safetensors, read_metadata, write_weights
from bertsmith.model.config import LORA_TARGETS, LoraConfig
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.lora import adapters_of
from bertsmith.model.span_model import SpanModel
from bertsmith.model.token_classifier import TokenClassifier

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ABOUT_FILE = "bertsmith_adapter.json"
CHECKPOINT_FILE = "lora.safetensors"
"""Of a run's checkpoints. They have no `adapter_config.json`, for transformers would put the
adapter onto weights that it is merged into already."""

TOKEN_TASK, EMBEDDING_TASK, ANSWER_TASK = "TOKEN_CLS", "FEATURE_EXTRACTION", "QUESTION_ANS"
"""PEFT's names of tasks that are not of whole texts."""

Adaptable = SequenceClassifier | TokenClassifier | SpanModel | SentenceEmbedder
"""Models that adapters can be put on."""

HEADS = ("pooler", "classifier", "span_scores")
"""Children of such a model that may be trained and saved beside adapters."""

PREFIX = "base_model.model."
"""How PEFT's names of tensors begin."""

_OUR_ADAPTER = re.compile(r"(encoder\.blocks\.\d+)\.adapters\.(\w+)")
QKV = LORA_TARGETS[:3]
"""Targets that are one product of ours, in the order of its rows."""


@dataclass(frozen=True, kw_only=True)
class AboutAdapter:
    """What an adapter of ours says besides PEFT's files."""

    base: str
    """The model it was trained on, as it was named."""

    base_sha256: str
    """`base_fingerprint` of that."""

    labels: tuple[str, ...]
    """Names of the classes, in the order of their ids."""


def base_fingerprint(model: nn.Module, *, trained: Sequence[str]) -> str:
    """sha256 over what an adapter builds on and does not bring along.

    Args:
        model: The base, without adapters.
        trained: Names of its children that come with the adapter.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name.partition(".")[0] not in trained:
            digest.update(f"{name} {list(parameter.shape)}".encode())
            digest.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def write_adapter(
    folder: Path,
    model: Adaptable,
    config: LoraConfig,
    *,
    trained: Sequence[str],
    about: AboutAdapter,
) -> None:
    """Write an adapter that `peft` loads, into an existing folder.

    In place and without fsync, as `write_model_files`.

    Args:
        folder: Where to write.
        model: With adapters.
        config: What they were made by.
        trained: Names of the children that are saved with them.
        about: More to say.

    Raises:
        OSError: The disk is full or forbids it.
    """
    tensors: list[tuple[str, Tensor]] = []
    is_bare = isinstance(model, SentenceEmbedder)  # to PEFT a BertModel, whose names have no bert.
    for name, adapter in adapters_of(model):
        module = _hf_module(name)
        module = PREFIX + (module.removeprefix("bert.") if is_bare else module)
        tensors.append((f"{module}.lora_A.weight", adapter.down))
        tensors.append((f"{module}.lora_B.weight", adapter.up))
    saved = {}
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] in trained:
            theirs = to_hf(name)[0]
            tensors.append((PREFIX + theirs, parameter))
            saved[theirs.removeprefix("bert.").partition(".")[0]] = True
    alpha = config.scale * config.rank
    content: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": _task_type(model),
        "base_model_name_or_path": about.base,
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": config.dropout,
        "target_modules": _target_modules(config.targets),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    _write_json(folder / ADAPTER_CONFIG, content)
    write_weights(folder / ADAPTER_WEIGHTS, tensors)
    # safetensors writes for the owner alone; a model is for whoever may read the folder.
    shutil.copymode(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)
    said = {"base": about.base, "base_sha256": about.base_sha256, "labels": list(about.labels)}
    _write_json(folder / ABOUT_FILE, said)


def write_checkpoint_file(
    folder: Path, model: nn.Module, *, trained: Sequence[str], base_sha256: str
) -> None:
    """Write all that a run with adapters trains, under our names, beside a checkpoint's model.

    Raises:
        OSError: The disk is full or forbids it.
    """
    tensors = list(_trained_parameters(model, trained).items())
    write_weights(folder / CHECKPOINT_FILE, tensors, metadata={"base_sha256": base_sha256})
    shutil.copymode(folder / CONFIG_NAME, folder / CHECKPOINT_FILE)


def read_checkpoint_file(
    folder: Path, model: nn.Module, *, trained: Sequence[str], base_sha256: str, base: str
) -> None:
    """Fill a model with what `write_checkpoint_file` wrote.

    Args:
        folder: The checkpoint's.
        model: The base, with adapters attached.
        trained: Names of its children that come with the adapters.
        base_sha256: `base_fingerprint` of the base.
        base: Its name, for the message.

    Raises:
        UserError: The checkpoint is of another base, or has other adapters.
    """
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        raise UserError(f"{file}: missing, so there are no adapters to go on with")
    if read_metadata(file).get("base_sha256") != base_sha256:
        raise UserError(
            f"{folder}: its adapters were trained on other weights than {base} holds now; put the "
            "base back that the run was begun with, or train into a new folder"
        )
    stored = {tensor.name: tensor for tensor in open_safetensors(file)}
    wanted = _trained_parameters(model, trained)
    if {n: tuple(p.shape) for n, p in wanted.items()} != {n: t.shape for n, t in stored.items()}:
        raise UserError(f"{file}: holds other adapters than --lora asks for; repeat the run's own")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(stored[name].read_float32())


def _hf_module(adapter_name: str) -> str:
    """Hugging Face's name of the product that an adapter of ours belongs to."""
    match = _OUR_ADAPTER.fullmatch(adapter_name)
    assert match is not None, "named by attach"
    block, target = match.groups()
    if target in QKV:
        names = to_hf(f"{block}.qkv.weight")
        return names[QKV.index(target)].removesuffix(".weight")
    return to_hf(f"{block}.{target}.weight")[0].removesuffix(".weight")


def _task_type(model: Adaptable) -> str:
    """PEFT's name of what a model is for."""
    match model:
        case SequenceClassifier():
            return "SEQ_CLS"
        case TokenClassifier():
            return TOKEN_TASK
        case SpanModel():
            return ANSWER_TASK
        case SentenceEmbedder():
            return EMBEDDING_TASK


def _target_modules(targets: Sequence[str]) -> list[str] | str:
    """PEFT's words for targets: ends of module names, or a pattern where an end is not enough."""
    names = [
        _hf_module(f"encoder.blocks.0.adapters.{target}").removeprefix("bert.encoder.layer.0.")
        for target in targets
    ]
    if "inner_out" not in targets:  # output.dense, which attention.output.dense ends with, too
        return [name.removeprefix("attention.self.") for name in names]
    return r"(.*\.)?encoder\.layer\.\d+\.(" + "|".join(re.escape(name) for name in names) + ")"


def _trained_parameters(model: nn.Module, trained: Sequence[str]) -> dict[str, nn.Parameter]:
    of_adapters = {
        f"{name}.{key}": parameter
        for name, adapter in adapters_of(model)
        for key, parameter in adapter.named_parameters()
    }
    heads = {n: p for n, p in model.named_parameters() if n.partition(".")[0] in trained}
    return of_adapters | heads


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
