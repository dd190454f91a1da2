"""A config as the planner's `RunShape`: the one way there, of `bertsmith plan` and of every run."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.data.config import has_pairs
from bertsmith.errors import UserError
from bertsmith.hf.config_json import CONFIG_NAME, model_part, read_config
from bertsmith.memory.shapes import (
    Adapters,
    Body,
    DeviceKind,
    NumberFormat,
    RunShape,
    Sharing,
    parameters_of,
)
from bertsmith.model.checkpointing import Body as BlockBody
from bertsmith.model.checkpointing import block_modes, parse_checkpointing
from bertsmith.model.config import PRESETS, EncoderConfig, LoraConfig
from bertsmith.parallel.config import ParallelConfig, is_worth_sharding
from bertsmith.recipes.config import FinetuneConfig, PretrainConfig
from bertsmith.recipes.planning.device import Target

SHORTEST = 3
"""Tokens of the shortest sequence: [CLS], one, [SEP]."""

MOMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Of one of AdamW's moments, by `--optim.moments`."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What a run computes on, how, and with how many others."""

    kind: DeviceKind
    number_format: NumberFormat
    body: Body
    threads: int = 1
    """Of the C kernels."""

    sharing: Sharing = "none"
    ranks: int = 1
    """Devices that share the run."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What pretraining has to know of its data."""

    longest: int
    """Tokens of the longest sequence."""

    fullest: int
    """Tokens of the fullest pack, at most."""

    mean_tokens: float
    """Tokens of a sequence on average."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What fine-tuning has to know of its data."""

    num_labels: int
    trained_rows: int | None
    """Different tokens in the texts; None: at most all there are."""

    longest: int
    """Tokens of the longest example."""

    tokens_of_step: int | None = None
    """Of the examples of a step, at most; None: as if all were the longest."""

    tokens_to_judge: int | None = None
    """Of all the examples that it is judged by; None: many."""

    has_pooler: bool = False
    """Whether the model comes with one, which adapters then leave as it is."""

    reads_words: bool = False
    """Whether the head reads every word, instead of one token an example."""


def ground_of(target: Target, precision: str) -> Ground:
    """What one device of a planned run will be.

    Raises:
        UserError: It does not compute the precision.
    """
    kind, number_format = target.device.kind, target.format_of(precision)
    is_fused = target.has_kernels and number_format != "fp16"
    return Ground(
        kind=kind,
        number_format=number_format,
        body="kernels" if is_fused else "plain",
        threads=len(os.sched_getaffinity(0)) if kind == "cpu" else 1,
    )


def shared(ground: Ground, asked: ParallelConfig, shape: RunShape, target: Target) -> Ground:
    """The ground with the ranks and the strategy that `--parallel` comes to on a target.

    Args:
        ground: Of one device.
        asked: `--parallel`.
        shape: Of the run on one device.
        target: What it is planned for.
    """
    auto = target.count if ground.kind == "cuda" else 1
    ranks = auto if asked.devices == "auto" else asked.devices
    if ranks == 1:
        return ground
    is_large = is_worth_sharding(
        parameters_of(shape).trained, memory_bytes=target.device.memory_bytes
    )
    may_shard = ground.kind == "cuda" and shape.adapters is None
    chosen: Sharing = "fsdp" if may_shard and is_large else "ddp"
    sharing = chosen if asked.strategy == "auto" else asked.strategy
    return replace(ground, sharing=sharing, ranks=ranks)


def pretraining_shape(
    config: PretrainConfig, encoder: EncoderConfig, ground: Ground, text: Text | None = None
) -> RunShape:
    """A pretraining in numbers, its packs whole.

    Args:
        config: Of the run.
        encoder: Its model's shape, dropout overridden.
        ground: What it runs on.
        text: What it learns from; None: whatever the config allows.

    Raises:
        UserError: Checkpointing or packs do not fit the model.
    """
    tokens, most = config.packing.tokens_per_pack, config.packing.max_sequence_tokens
    if most > encoder.max_position_embeddings:
        raise UserError(
            f"--packing.max_sequence_tokens {most}: the model has "
            f"{encoder.max_position_embeddings} positions; give at most that"
        )
    shape = RunShape(
        encoder=encoder,
        task="masked_lm",
        tokens_per_pack=tokens if text is None else min(tokens, text.fullest),
        longest=most if text is None else text.longest,
        read_share=config.masking.largest_share,
        pair_share=(
            1.0 / (most if text is None else text.mean_tokens)
            if has_pairs(config.objective)
            else 0.0
        ),
        moment_bytes=MOMENT_BYTES[config.optim.moments],
        has_snapshot=True,
    )
    return _on(ground, shape, config.checkpointing, packs=config.tokens_per_step // tokens)


def finetuning_shape(
    config: FinetuneConfig, encoder: EncoderConfig, ground: Ground, table: Table
) -> RunShape:
    """A fine-tuning in numbers, its packs whole.

    Args:
        config: Of the run.
        encoder: Its model's shape, dropout overridden.
        ground: What it runs on.
        table: What it learns from.

    Raises:
        UserError: Checkpointing does not fit the model.
    """
    longest = min(table.longest, encoder.max_position_embeddings)
    rows = min(table.trained_rows or encoder.vocab_size, encoder.vocab_size)
    in_a_step = table.tokens_of_step or config.examples_per_step * longest
    judged = min(config.tokens_per_pack, table.tokens_to_judge or config.tokens_per_pack)
    shape = RunShape(
        encoder=encoder,
        task="classifier",
        tokens_per_pack=max(min(config.tokens_per_pack, in_a_step), longest),
        evaluation_tokens=max(judged, longest),
        longest=longest,
        read_share=1.0 if table.reads_words else 1.0 / SHORTEST,
        most_read=in_a_step if table.reads_words else config.examples_per_step,
        num_labels=table.num_labels,
        head_norm=config.head.norm,
        moment_bytes=MOMENT_BYTES[config.optim.moments],
        adapters=adapters_of(config.lora, has_pooler=table.has_pooler),
        trained_rows=None if ground.sharing == "fsdp" or config.lora.is_on else rows,
    )
    packs = -(-in_a_step // config.tokens_per_pack)
    return _on(ground, shape, config.checkpointing, packs=packs)


def adapters_of(lora: LoraConfig, *, has_pooler: bool) -> Adapters | None:
    """`--lora` as the planner is told it."""
    if not lora.is_on:
        return None
    return Adapters(
        rank=lora.rank,
        targets=tuple(lora.targets),
        drops=lora.dropout > 0.0,
        trains_pooler=not has_pooler,
    )


def _on(ground: Ground, shape: RunShape, checkpointing: str, *, packs: int) -> RunShape:
    """The shape on its ground, with what its blocks keep."""
    shape = replace(
        shape,
        number_format=ground.number_format,
        device=ground.kind,
        body=ground.body,
        threads=ground.threads,
        sharing=ground.sharing,
        ranks=ground.ranks,
        packs_per_step=max(-(-packs // ground.ranks), 1),
    )
    blocks = BlockBody(
        is_fused=ground.body == "kernels" and shape.adapters is None,
        element_bytes=shape.product_bytes,
        sequence_tokens=0.0,
    )
    try:
        modes = block_modes(parse_checkpointing(checkpointing), shape.encoder, blocks)
    except ValueError as error:
        raise UserError(f"--checkpointing {checkpointing}: {error}") from error
    return replace(shape, block_modes=modes)


def encoder_of(config: PretrainConfig | FinetuneConfig) -> EncoderConfig:
    """The model's shape, from a preset or a file; nothing is downloaded.

    Raises:
        UserError: There is no such model here.
    """
    path = Path(config.model).expanduser()
    if config.model in PRESETS:
        encoder = PRESETS[config.model]
        if isinstance(config, PretrainConfig):
            longest = config.packing.max_sequence_tokens
            encoder = replace(
                encoder,
                vocab_size=vocabulary_of(config.data) or encoder.vocab_size,
                max_position_embeddings=max(encoder.max_position_embeddings, longest),
            )
    elif path.exists():
        encoder = read_config(model_part(path))
    else:
        encoder = read_config(cached_folder(config.model))
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        value = getattr(config, name)
        if value is not None:
            encoder = replace(encoder, **{name: value})
    return encoder


def cached_folder(name: str) -> Path:
    """The config of a hub model that was downloaded before.

    Raises:
        UserError: It was not.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - a quarter of a second

    try:
        file = try_to_load_from_cache(name, CONFIG_NAME)
    except ValueError:  # no name of the hub's form
        file = None
    if isinstance(file, str):
        return Path(file)
    raise UserError(
        f"--model {name}: no folder or {CONFIG_NAME} here, and not in the hub's cache; give one, "
        f"or a preset: {', '.join(PRESETS)}"
    )


def manifest_of(data: str) -> dict[str, Any]:
    """Of prepared text; empty where there is none, since a plan may come before the data."""
    try:
        found = json.loads((Path(data) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def vocabulary_of(data: str) -> int | None:
    """Tokens of the prepared text's tokenizer."""
    found = manifest_of(data).get("tokenizer", {}).get("vocab_size")
    return found if isinstance(found, int) else None
