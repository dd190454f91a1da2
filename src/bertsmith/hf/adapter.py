"""Adapters in PEFT's file format, both ways; and as a run's checkpoints keep them.

    adapter/adapter_config.json        PEFT's, version 0.18 and later read what stands here
            adapter_model.safetensors  A and B by Hugging Face's names, and the head that goes along
            bertsmith_adapter.json     which base the adapter is for, and its labels

Nothing of `peft` is imported: the format is its documented one (PEFT docs, "PEFT checkpoint
format").
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
from bertsmith.hf.config_json import read_labels
from bertsmith.hf.hub import resolve
from bertsmith.hf.keys import canonical, from_hf, to_hf
from bertsmith.hf.load import load_classifier
from bertsmith.hf.stored_model import listed
from bertsmith.hf.weights import StoredTensor, open_safetensors, read_metadata, write_weights
from bertsmith.model.config import LORA_TARGETS, LoraConfig
from bertsmith.model.encoder import Block
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.lora import adapters_of, attach_one, merged

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ABOUT_FILE = "bertsmith_adapter.json"
CHECKPOINT_FILE = "lora.safetensors"
"""Of a run's checkpoints. They have no `adapter_config.json`, for transformers would put the
adapter onto weights that it is merged into already."""

HEADS = ("pooler", "classifier")
"""Children of a classifier that may be trained and saved beside adapters."""

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(.+)\.lora_([AB])\.weight")
_OUR_ADAPTER = re.compile(r"(encoder\.blocks\.\d+)\.adapters\.(\w+)")
_QKV = LORA_TARGETS[:3]

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
    model: SequenceClassifier,
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
    for name, adapter in adapters_of(model):
        module = _PREFIX + _hf_module(name)
        tensors.append((f"{module}.lora_A.weight", adapter.down))
        tensors.append((f"{module}.lora_B.weight", adapter.up))
    saved = {}
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] in trained:
            theirs = to_hf(name)[0]
            tensors.append((_PREFIX + theirs, parameter))
            saved[theirs.removeprefix("bert.").partition(".")[0]] = True
    alpha = config.scale * config.rank
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "base_model_name_or_path": about.base,
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": config.dropout,
        "target_modules": _target_modules(config.targets),
        "modules_to_save": list(saved),
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
    """Write all that a run with adapters trains, under our names, into a checkpoint's folder.

    Raises:
        OSError: The disk is full or forbids it.
    """
    tensors = list(_trained_parameters(model, trained).items())
    write_weights(folder / CHECKPOINT_FILE, tensors, metadata={"base_sha256": base_sha256})


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


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """An adapter's folder, its tensors not read yet."""

    folder: Path
    config: LoraConfig
    base: str
    """The model it names as its base."""

    low_rank: Mapping[tuple[int, str], Mapping[str, StoredTensor]]
    """A and B, by layer and target."""

    heads: Mapping[str, StoredTensor]
    """Parameters that come along, under our names."""

    about: AboutAdapter | None
    """None: another program wrote it."""

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
    low_rank: dict[tuple[int, str], dict[str, StoredTensor]] = {}
    heads: dict[str, StoredTensor] = {}
    strange = []
    for tensor in open_safetensors(folder / ADAPTER_WEIGHTS):
        name = tensor.name.removeprefix(_PREFIX)
        match = _LOW_RANK.fullmatch(name)
        if match and (place := _place_of(match[1])):
            low_rank.setdefault(place, {})[match[2]] = tensor
        elif not match and (slot := from_hf(canonical(name))) and slot.name.startswith(HEADS):
            heads[slot.name] = tensor
        else:
            strange.append(tensor.name)
    if strange:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS}: holds what bertsmith has no place for: {listed(strange)}"
        )
    try:
        rank, alpha = int(content["r"]), float(content["lora_alpha"])
        config = LoraConfig(
            rank=rank,
            alpha=alpha,
            dropout=float(content.get("lora_dropout") or 0.0),
            targets=[t for t in LORA_TARGETS if any(t == target for _, target in low_rank)],
        )
        if rank < 1:
            raise ValueError(f"r is {rank}")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / ADAPTER_CONFIG}: is no LoRA config ({error})") from None
    for pair in low_rank.values():
        ranks = (pair[m].shape[d] if m in pair else None for m, d in (("A", 0), ("B", -1)))
        if any(found != rank for found in ranks):
            raise UserError(
                f"{folder}: {ADAPTER_CONFIG} says rank {rank} and {ADAPTER_WEIGHTS} has others; "
                "the two files do not belong together"
            )
    return StoredAdapter(
        folder=folder,
        config=config,
        base=str(content.get("base_model_name_or_path") or "a base it does not name"),
        low_rank=low_rank,
        heads=heads,
        about=_read_about(folder),
    )


def load_adapted(where: str | Path, adapter: Path) -> tuple[SequenceClassifier, tuple[str, ...]]:
    """A base with an adapter merged into it, in fp32 on the CPU, and the names of its classes.

    Args:
        where: Folder or hub name of the base.
        adapter: The adapter's folder.

    Raises:
        UserError: One of them cannot be read, or the adapter is for another base.
    """
    folder, stored = resolve(where), open_adapter(adapter)
    labels = _labels_of(folder, stored)
    model, report = load_classifier(folder, labels=labels, norm="none")
    labels = labels or read_labels(folder, num_labels=model.classifier.out_features)
    lacking = [name for name in report.new if name not in stored.trained]
    if lacking:
        raise UserError(
            f"{adapter}: brings no {lacking[0]} along and {folder} has none; name the base that it "
            f"was trained on, {stored.base}"
        )
    if stored.about is not None and (
        base_fingerprint(model, trained=stored.trained) != stored.about.base_sha256
    ):
        raise UserError(_other_base(stored, folder))
    _put_on(model, stored, folder)
    return merged(model), labels


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
def _put_on(model: SequenceClassifier, stored: StoredAdapter, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in stored.heads.items():
        if tensor.shape != tuple(parameters[name].shape):
            raise UserError(_other_base(stored, folder))
        parameters[name].copy_(tensor.read_float32())
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


def _hf_module(adapter_name: str) -> str:
    """Hugging Face's name of the product that an adapter of ours belongs to."""
    match = _OUR_ADAPTER.fullmatch(adapter_name)
    assert match is not None, "named by attach"
    block, target = match.groups()
    if target in _QKV:
        names = to_hf(f"{block}.qkv.weight")
        return names[_QKV.index(target)].removesuffix(".weight")
    return to_hf(f"{block}.{target}.weight")[0].removesuffix(".weight")


def _place_of(hf_module: str) -> tuple[int, str] | None:
    """Layer and target of a product by Hugging Face's name."""
    slot = from_hf(canonical(f"{hf_module}.weight"))
    if slot is None or not slot.name.startswith("encoder.blocks."):
        return None
    _, _, layer, module, _ = slot.name.split(".")
    target = _QKV[slot.part] if module == "qkv" else module
    return (int(layer), target) if target in LORA_TARGETS else None


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


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
