"""none, dp, ddp and fsdp behind one small interface, so that the training step knows none of them.

Whatever the strategy, a step's gradient is the sum over all packs of the step, each pack's loss
already divided by the targets of all of them. FSDP would average over ranks: that is undone here,
and nowhere else.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from bertsmith.batch import LossSum, StepShare
from bertsmith.model.encoder import Block
from bertsmith.parallel.data_parallel import CpuReplicas, PackDataParallel
from bertsmith.parallel.gradient_sum import GradientSum
from bertsmith.parallel.sharding import whole
from bertsmith.parallel.world import World

ModelT = TypeVar("ModelT", bound=nn.Module)

INFERENCE_METHODS = (
    *("logits_MV", "logits_NC", "logits_MC", "logits_T2"),
    *("nats_and_right_M", "pair_logits_P2"),
)
"""What evaluation calls instead of forward; FSDP has to gather parameters for them too. No forward
calls one of them: parameters would be let go in the midst of it."""


class Strategy:
    """none: one device. What the other strategies refine."""

    name = "none"

    def __init__(self, model: nn.Module, world: World) -> None:
        """Train `model`, which is on its device already."""
        self.model, self.world = model, world
        self.meets_in_passes = False
        """Whether ranks meet within a pass, so that one whose pass fails leaves others waiting."""

    @property
    def packs_at_once(self) -> int:
        """Packs that are computed at the same time, on all devices together."""
        return self.world.size

    def rounds(self, packs: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """A rank's packs in the portions that `losses` takes."""
        for pack in packs:
            yield [pack]

    def losses(self, packs: Sequence[Any], *, dropout_seed: int) -> list[LossSum]:
        """Loss sums of one round's packs, which are on the CPU still."""
        device = next(self.model.parameters()).device
        return [self.model(pack.to(device), dropout_seed=dropout_seed) for pack in packs]

    def tokens_by_device(self, share: StepShare[Any]) -> list[int]:
        """This rank's tokens of a step, at the places of its devices among all; others are 0."""
        tokens = [0] * self.packs_at_once
        counted = share.packs[: len(share.numbers)]  # fillers come after
        tokens[self.world.rank] = sum(pack.num_tokens for pack in counted)
        return tokens

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Around a round's forward and backward: ranks meet in the last one of a step alone."""
        return nullcontext()

    def trained_changed(self) -> None:
        """Other parameters than before ask for gradients, the same ones on every rank."""

    def sum_over_shards(self, square: float) -> float:
        """A sum over parameters' parts, such as the squared gradient norm, over all parts."""
        return square

    def whole_tensors(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Tensors shaped like parameters in one piece, for rank 0; every rank has to ask."""
        return list(named)

    def whole_model(self, model: ModelT) -> ModelT:
        """The model with whole parameters, for rank 0 to write; every rank has to ask."""
        return model


class Replicas(Strategy):
    """dp: one process feeds several devices."""

    name = "dp"

    def __init__(
        self, model: nn.Module, world: World, *, num_devices: int, dtype: torch.dtype
    ) -> None:
        """Use the first `num_devices` GPUs; on the CPU, so many copies of the model.

        `dtype` is that of matrix products.
        """
        super().__init__(model, world)
        self._num_devices = num_devices
        on_gpu = next(model.parameters()).device.type == "cuda"
        self._replicas: nn.Module = (
            PackDataParallel(model, num_devices=num_devices, dtype=dtype)
            if on_gpu
            else CpuReplicas(model)
        )

    @property
    def packs_at_once(self) -> int:
        """One pack a device."""
        return self._num_devices

    def rounds(self, packs: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """As many packs as there are devices, while they last."""
        for start in range(0, len(packs), self._num_devices):
            yield packs[start : start + self._num_devices]

    def tokens_by_device(self, share: StepShare[Any]) -> list[int]:
        """Tokens of each device of this process."""
        tokens = [0] * self._num_devices
        for number, pack in enumerate(share.packs):
            tokens[number % self._num_devices] += pack.num_tokens
        return tokens

    def losses(self, packs: Sequence[Any], *, dropout_seed: int) -> list[LossSum]:
        """Loss sums of packs that are computed at the same time."""
        found: list[LossSum] = self._replicas(packs, dropout_seed=dropout_seed)
        return found


class Distributed(Strategy):
    """ddp: every rank has the whole model; gradients are added while the backward still runs."""

    name = "ddp"

    def __init__(self, model: nn.Module, world: World) -> None:
        """Ranks have the same weights already, by seed or by checkpoint; rank 0's are made sure."""
        super().__init__(model, world)
        for values in [*model.parameters(), *model.buffers()]:
            dist.broadcast(values.detach(), src=0)
        self._gradients = GradientSum(model.parameters())

    def trained_changed(self) -> None:
        """Buckets hold the gradients that were asked for when they were made: make them anew."""
        self._gradients.leave()
        self._gradients = GradientSum(self.model.parameters())

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Gradients of all but the last round stay on their rank."""
        return self._gradients.meeting() if is_last else nullcontext()


class FullySharded(Strategy):
    """fsdp: every rank holds a part of each parameter, gradient and moment (FSDP2).

    Blocks gather their parameters when it is their turn. The token table, which the decoder is tied
    to, stays with the head in the root.
    """

    name = "fsdp"

    def __init__(self, model: nn.Module, world: World, *, dtype: torch.dtype) -> None:
        """Shard `model` in place: its parameters become other objects.

        Args:
            model: On its device, the same on every rank.
            world: Of at least two ranks.
            dtype: Of matrix products. On a GPU parameters travel in it; gradients travel in fp32.
                The CPU kernels read fp32 parameters, so there they travel as they are.
        """
        super().__init__(model, world)
        self.meets_in_passes = True
        self._skeleton = shell_of(model)
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (world.size,))
        policy = MixedPrecisionPolicy()
        if device.type == "cuda" and dtype != torch.float32:
            policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for module in [m for m in model.modules() if isinstance(m, Block)] + [model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        for name in INFERENCE_METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._root = cast(FSDPModule, model)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Gradients of all but the last round stay whole on their rank."""
        self._root.set_requires_gradient_sync(is_last)
        self._root.set_is_last_backward(is_last)
        return nullcontext()

    def sum_over_shards(self, square: float) -> float:
        """Over the shards of all ranks."""
        return self.world.sums([square])[0]

    def whole_tensors(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Gathered one after the other; none are kept on the other ranks."""
        pieces = ((name, whole(tensor)) for name, tensor in named)  # one at a time
        return [(name, tensor.cpu()) for name, tensor in pieces if self.world.is_main]

    def whole_model(self, model: ModelT) -> ModelT:
        """A copy in one piece on rank 0's CPU; on the other ranks an empty one."""
        assert model is self.model
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # evaluation leaves the root whole, in the type of products
        filled = self._skeleton.to_empty(device="cpu") if self.world.is_main else None
        target = dict(filled.named_parameters()) if filled is not None else {}
        named = ((name, p.detach()) for name, p in self.model.named_parameters())
        with torch.no_grad():
            for name, values in self.whole_tensors(named):
                target[name].copy_(values)
            if filled is not None:
                for name, buffer in self.model.named_buffers():
                    filled.get_buffer(name).copy_(buffer)
        return cast(ModelT, filled if filled is not None else self._skeleton)


def shell_of(model: ModelT) -> ModelT:
    """A copy without values, parameters that are tied still tied; takes no memory of the device."""
    empty: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    empty |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, empty)
