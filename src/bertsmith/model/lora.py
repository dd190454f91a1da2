"""Adapters on an encoder: attached to it, merged into its weights, taken out of them again.

Shape legend: O width coming out of a product, I width going into it, R rank.
"""

import copy
import math
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from bertsmith.model.adapter import Adapter
from bertsmith.model.config import LORA_TARGETS, LoraConfig
from bertsmith.model.encoder import Block
from bertsmith.model.heads import seed_of

ModelT = TypeVar("ModelT", bound=nn.Module)

ADAPTER_SITE = 2_000_003
"""Dropout site of the first adapter: beyond any block's and any head's."""

SITES_PER_BLOCK = 8
"""Adapters of a block have their sites in the order of `LORA_TARGETS`, with room for more."""


def attach(model: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Put new adapters on every block of a model; its results stay what they were.

    A is uniform with the variance 1 / (3 I), each from a generator keyed by its name, and B zero,
    as peft starts them: `kaiming_uniform_` with a = sqrt(5) (He et al. 2015).

    Args:
        model: Holds an encoder without adapters; they are made on its device, in fp32.
        config: With a rank of at least 1.
        seed: All A follow from it.
    """
    for name, block in _blocks(model):
        number = int(name.rpartition(".")[2])
        for target in LORA_TARGETS:
            if target not in config.targets:
                continue
            adapter = attach_one(block, target, config, layer=number)
            generator = torch.Generator().manual_seed(
                seed_of(f"{name}.adapters.{target}.down", seed)
            )
            # gain sqrt(2 / (1 + 5)) over sqrt(I), times sqrt(3) for a uniform distribution
            bound = 1.0 / math.sqrt(adapter.down.shape[1])
            with torch.no_grad():
                drawn = torch.empty(adapter.down.shape)
                adapter.down.copy_(drawn.uniform_(-bound, bound, generator=generator))


def attach_one(block: Block, target: str, config: LoraConfig, *, layer: int) -> Adapter:
    """Put one adapter on a block, whose A has no values yet.

    Args:
        block: One of an encoder's.
        target: One of `LORA_TARGETS`.
        config: Rank, scale and dropout.
        layer: The block's number, from 0.
    """
    weight_OI = target_weight_OI(block, target)
    adapter = Adapter(
        width_in=weight_OI.shape[1],
        width_out=weight_OI.shape[0],
        rank=config.rank,
        scale=config.scale,
        drop_prob=config.dropout,
        dropout_site=ADAPTER_SITE + SITES_PER_BLOCK * layer + LORA_TARGETS.index(target),
    )
    block.adapters[target] = adapter.to(weight_OI.device)
    return adapter


def freeze_encoder(model: nn.Module, *, trained: tuple[str, ...]) -> None:
    """Have adapters and some children of a model ask for gradients, and nothing else.

    Args:
        model: With adapters.
        trained: Names of its children that are trained wholly.
    """
    adapters = {id(p) for _, adapter in adapters_of(model) for p in adapter.parameters()}
    for name, parameter in model.named_parameters():
        is_trained = id(parameter) in adapters or name.partition(".")[0] in trained
        parameter.requires_grad_(is_trained)


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """All adapters of a model, by their names in it."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def has_adapters(model: nn.Module) -> bool:
    """Whether any block of a model has an adapter."""
    return next(adapters_of(model), None) is not None


def merged(model: ModelT) -> ModelT:
    """The model with its adapters in its weights: a copy without adapters, or itself without any.

    Whatever no adapter changes is not copied: the two models share it. A token table that a
    decoder is tied to is among that.
    """
    if not has_adapters(model):
        return model
    shared = {id(p): p for p in (*model.parameters(), *model.buffers())}
    for _, block in _blocks(model):
        for target, _ in _adapters(block):
            shared.pop(id(_holder(block, target).weight), None)  # one weight of three targets
    for _, adapter in adapters_of(model):
        for parameter in adapter.parameters():
            shared.pop(id(parameter))
    whole = copy.deepcopy(model, cast(dict[int, object], shared))
    merge(whole)
    for _, block in _blocks(whole):
        block.adapters = nn.ModuleDict()
    return whole


def share_equal(first: nn.Module, other: nn.Module) -> None:
    """Have parameters of a model be those of another one where both have the same values.

    Args:
        first: Keeps its own.
        other: Gives up its copies; not to be trained afterwards.
    """
    theirs = dict(first.named_parameters())
    for name, parameter in other.named_parameters():
        own = theirs.get(name)
        if own is not None and own.shape == parameter.shape and torch.equal(own, parameter):
            parameter.data = own.data


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add what adapters add to the weights in place; the adapters stay as they are."""
    for _, block in _blocks(model):
        for target, adapter in _adapters(block):
            target_weight_OI(block, target).add_(adapter.weight_OI())


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Take what adapters added out of the weights again, up to rounding."""
    for _, block in _blocks(model):
        for target, adapter in _adapters(block):
            target_weight_OI(block, target).sub_(adapter.weight_OI())


def target_weight_OI(block: Block, target: str) -> Tensor:
    """The weight of a product by the name that configs give it: a view of a parameter's values."""
    weight = _holder(block, target).weight.detach()
    if target in ("query", "key", "value"):
        return weight.chunk(3)[("query", "key", "value").index(target)]
    return weight


def _holder(block: Block, target: str) -> nn.Linear:
    linear = block.qkv if target in ("query", "key", "value") else getattr(block, target)
    assert isinstance(linear, nn.Linear)
    return linear


def _blocks(model: nn.Module) -> Iterator[tuple[str, Block]]:
    for name, module in model.named_modules():
        if isinstance(module, Block):
            yield name, module


def _adapters(block: Block) -> Iterator[tuple[str, Adapter]]:
    for target, adapter in block.adapters.items():
        assert isinstance(adapter, Adapter)
        yield target, adapter
