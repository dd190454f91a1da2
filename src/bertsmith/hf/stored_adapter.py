"""Adapters read from PEFT's file format, and merged into their base.

What a config asks for that would change the arithmetic is refused by its key.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from bertsmith.errors import UserError
from bertsmith.hf.adapter import (
    ABOUT_FILE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ANSWER_TASK,
    EMBEDDING_TASK,
    HEADS,
    PREFIX,
    QKV,
    TOKEN_TASK,
    AboutAdapter,
    Adaptable,
    base_fingerprint,
)
from bertsmith.hf.config_json import read_labels
from bertsmith.hf.hub import resolve
from bertsmith.hf.keys import Slot, canonical, from_hf
from bertsmith.hf.load import (
    load_classifier,
    load_encoder,
    load_span_model,
    load_token_classifier,
)
from bertsmith.hf.sentence import read_pooling
from bertsmith.hf.stored_model import LoadReport, listed
from bertsmith.hf.weights import StoredTensor, open_safetensors
from bertsmith.model.config import LORA_TARGETS, LoraConfig
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.encoder import Block
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.lora import attach_one, merged
from bertsmith.model.token_classifier import TokenClassifier

ModelT = TypeVar("ModelT", bound=Adaptable)

_LOW_RANK = re.compile(r"(.+)\.lora_([AB])\.weight")

Pair = dict[str, StoredTensor]
"""A and B of an adapter."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""What a key of PEFT's config must be, where it is there: all else changes the arithmetic, or the
base (pissa, olora, corda and loftq do)."""


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """An adapter's folder, its tensors not read yet."""

    folder: Path
    config: LoraConfig
    base: str
    """The model it names as its base."""

    low_rank: Mapping[tuple[int, str], Pair]
    """A and B, by layer and target."""

    on_heads: Mapping[str, Pair]
    """A and B of what stands on the encoder, by our parameter: peft's "all-linear" adapts a pooler,
    too."""

    heads: Mapping[str, StoredTensor]
    """Parameters that come along, under our names."""

    about: AboutAdapter | None
    """None: another program wrote it."""

    task_type: str
    """What it is for, in peft's words; empty if it does not say."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Children that come along."""
        return tuple(head for head in HEADS if f"{head}.weight" in self.heads)


def open_adapter(folder: Path) -> StoredAdapter:
    """Read an adapter's config and table of contents; PEFT's own and ours alike.

    Raises:
        UserError: It is no LoRA adapter, does what bertsmith does not compute, or is damaged.
    """
    content = _read_config(folder)
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(
            f"{folder}: holds no {ADAPTER_WEIGHTS}; pickled weights are not read, save the adapter "
            "with safe_serialization=True"
        )
    low_rank, on_heads, heads = _sorted_tensors(folder / ADAPTER_WEIGHTS)
    try:
        rank, alpha = int(content["r"]), float(content["lora_alpha"])
        config = LoraConfig(
            rank=rank,
            alpha=alpha,
            dropout=float(content.get("lora_dropout") or 0.0),
            targets=[t for t in LORA_TARGETS if any(t == target for _, target in low_rank)]
            or list(LORA_TARGETS),
        )
        if rank < 1:
            raise ValueError(f"r is {rank}")
    except KeyError as error:
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: is no LoRA config: {error} is missing; save the adapter "
            "again, or copy the file that came with it"
        ) from None
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: is no LoRA config ({error}); save the adapter again, or "
            "copy the file that came with it"
        ) from None
    _check_ranks(folder, [*low_rank.values(), *on_heads.values()], config.rank)
    return StoredAdapter(
        folder=folder,
        config=config,
        base=str(content.get("base_model_name_or_path") or "a base it does not name"),
        low_rank=low_rank,
        on_heads=on_heads,
        heads=heads,
        about=_read_about(folder),
        task_type=str(content.get("task_type") or ""),
    )


def task_type_of(folder: Path) -> str:
    """What an adapter is for, in peft's words; empty if it does not say.

    Raises:
        UserError: It is no adapter.
    """
    return str(_read_config(folder).get("task_type") or "")


def load_adapted(where: str | Path, adapter: Path) -> tuple[Adaptable, tuple[str, ...]]:
    """A base with an adapter merged into it, in fp32 on the CPU, and the names of its classes.

    Which head the model has follows from what the adapter says that it is for; an adapter that does
    not say it is of a classifier of texts. Models of embeddings and of answers have no classes.

    Args:
        where: Folder or hub name of the base.
        adapter: The adapter's folder.

    Raises:
        UserError: One of them cannot be read, or the adapter is for another base.
    """
    folder, stored = resolve(where), open_adapter(adapter)
    if stored.task_type == EMBEDDING_TASK:
        if stored.trained or stored.on_heads:
            raise UserError(
                f"{adapter}: is for {EMBEDDING_TASK} and brings a head along; bertsmith has no "
                "embeddings of that kind"
            )
        encoder, report = load_encoder(folder)
        pooling = read_pooling(adapter) or read_pooling(folder) or "mean"
        return _adapted(SentenceEmbedder(encoder, pooling=pooling), report, stored, folder), ()
    if stored.task_type == ANSWER_TASK:
        reader, report = load_span_model(folder)
        return _adapted(reader, report, stored, folder), ()
    labels = _labels_of(folder, stored)
    model: SequenceClassifier | TokenClassifier
    if stored.task_type == TOKEN_TASK:
        model, report = load_token_classifier(folder, labels=labels)
    else:
        model, report = load_classifier(folder, labels=labels, norm="none")
    labels = labels or read_labels(folder, num_labels=model.classifier.out_features)
    return _adapted(model, report, stored, folder), labels


def _adapted(model: ModelT, report: LoadReport, stored: StoredAdapter, folder: Path) -> ModelT:
    """The model of a base with the adapter merged into it.

    Raises:
        UserError: The adapter is for another base.
    """
    lacking = [name for name in report.new if name not in stored.trained]
    if lacking:
        raise UserError(
            f"{stored.folder}: brings no {lacking[0]} along and {folder} has none; name the base "
            f"that it was trained on, {stored.base}"
        )
    if stored.about is not None and (
        base_fingerprint(model, trained=stored.trained) != stored.about.base_sha256
    ):
        raise UserError(_other_base(stored, folder))
    _put_on(model, stored, folder)
    return merged(model)


def _labels_of(folder: Path, stored: StoredAdapter) -> tuple[str, ...] | None:
    """Names of the classes; None: those of the base's own head."""
    weight = stored.heads.get("classifier.weight")
    if weight is None:
        return None
    count = weight.shape[0]
    if stored.about is not None and len(stored.about.labels) == count:
        return stored.about.labels
    try:
        return read_labels(folder, num_labels=count)
    except UserError:  # a base of another task, whose head is not used
        return tuple(f"LABEL_{i}" for i in range(count))


@torch.no_grad()
def _put_on(model: Adaptable, stored: StoredAdapter, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in stored.heads.items():
        if name not in parameters or tensor.shape != tuple(parameters[name].shape):
            raise UserError(_other_base(stored, folder))
        parameters[name].copy_(tensor.read_float32())
    for name, pair in stored.on_heads.items():
        up, down = pair["B"].read_float32(), pair["A"].read_float32()
        if name not in parameters or (up.shape[0], down.shape[1]) != tuple(parameters[name].shape):
            raise UserError(_other_base(stored, folder))
        parameters[name].add_(up @ down, alpha=stored.config.scale)
    blocks = model.encoder.blocks
    for (layer, target), pair in stored.low_rank.items():
        if layer >= len(blocks):
            raise UserError(_other_base(stored, folder))
        block = blocks[layer]
        assert isinstance(block, Block)
        adapter = attach_one(block, target, stored.config, layer=layer)
        for parameter, tensor in ((adapter.down, pair["A"]), (adapter.up, pair["B"])):
            if tensor.shape != tuple(parameter.shape):
                raise UserError(_other_base(stored, folder))
            parameter.copy_(tensor.read_float32())


def _other_base(stored: StoredAdapter, folder: Path) -> str:
    return (
        f"{stored.folder}: is an adapter for another base than {folder}; name the one it was "
        f"trained on, {stored.base}"
    )


def _sorted_tensors(
    file: Path,
) -> tuple[dict[tuple[int, str], Pair], dict[str, Pair], dict[str, StoredTensor]]:
    """Adapters by layer and target, those of heads by parameter, and whole parameters.

    Raises:
        UserError: Something is none of these.
    """
    low_rank: dict[tuple[int, str], Pair] = {}
    on_heads: dict[str, Pair] = {}
    heads: dict[str, StoredTensor] = {}
    strange = []
    for tensor in open_safetensors(file):
        name = tensor.name.removeprefix(PREFIX)
        match = _LOW_RANK.fullmatch(name)
        slot = from_hf(canonical(f"{match[1]}.weight" if match else name))
        if slot is None:
            strange.append(tensor.name)
        elif slot.name.startswith(HEADS):
            if match:
                on_heads.setdefault(slot.name, {})[match[2]] = tensor
            else:
                heads[slot.name] = tensor
        elif match and (place := _place_of(slot)):
            low_rank.setdefault(place, {})[match[2]] = tensor
        else:
            strange.append(tensor.name)
    if strange:
        raise UserError(f"{file}: holds what bertsmith has no place for: {listed(strange)}")
    return low_rank, on_heads, heads


def _check_ranks(folder: Path, pairs: Sequence[Pair], rank: int) -> None:
    for pair in pairs:
        shapes = [pair[one].shape if one in pair else () for one in "AB"]
        if any(len(s) != 2 for s in shapes) or (shapes[0][0], shapes[1][1]) != (rank, rank):
            raise UserError(
                f"{folder}: {ADAPTER_CONFIG} says rank {rank} and {ADAPTER_WEIGHTS} has others; "
                "the two files do not belong together"
            )


def _place_of(slot: Slot) -> tuple[int, str] | None:
    """Layer and target of a weight; None if it is none of a block's products."""
    if not slot.name.startswith("encoder.blocks."):
        return None
    _, _, layer, module, _ = slot.name.split(".")
    target = QKV[slot.part] if module == "qkv" else module
    return (int(layer), target) if target in LORA_TARGETS else None


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: is no adapter, it holds no {ADAPTER_CONFIG}; name the adapter/ of a run, "
            "or a folder that peft wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not readable ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: is no JSON object")
    for key, allowed in _NEUTRAL.items():
        if key in content and content[key] not in allowed:
            shown = ", ".join(str(one) for one in allowed[:1])
            raise UserError(
                f"{file}: {key} is {json.dumps(content[key])}; bertsmith reads LoRA adapters with "
                f"{key} {shown}"
            )
    return content


def _read_about(folder: Path) -> AboutAdapter | None:
    file = folder / ABOUT_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return AboutAdapter(
            base=str(content["base"]),
            base_sha256=str(content["base_sha256"]),
            labels=tuple(str(label) for label in content["labels"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not readable ({error}); copy the adapter again") from None
