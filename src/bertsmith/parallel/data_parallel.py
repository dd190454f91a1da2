"""torch.nn.DataParallel for packs: one process, several GPUs, as in the classic guides.

A round of packs goes out whole, one a device; what comes back from each is its loss sum alone, so
the first device carries nobody's logits. Gradients meet on the first device, which also holds the
optimizer: that imbalance is DataParallel's own, and why ddp is the better choice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from bertsmith.batch import LossSum


class InFormat(nn.Module):
    """A module that computes in a format, in whichever thread it is called.

    torch's DataParallel starts a thread for each replica and switches autocast on there, but
    forgets its dtype (torch 2.13): a bf16 run would compute in fp16.
    """

    def __init__(self, module: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
        """Wrap; fp32 leaves everything as it is."""
        super().__init__()
        self.module = module
        self._device_type, self._dtype = device_type, dtype

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        enabled = self._dtype != torch.float32
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=enabled):
            return self.module(*inputs, **kwargs)


class PackDataParallel(nn.DataParallel[nn.Module]):
    """`forward(packs, dropout_seed=...)` gives one `LossSum` for each pack, on the first device."""

    def __init__(self, module: nn.Module, *, num_devices: int, dtype: torch.dtype) -> None:
        """Use the first GPUs, computing in `dtype`."""
        within = InFormat(module, device_type="cuda", dtype=dtype)
        super().__init__(within, device_ids=list(range(num_devices)))

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """One pack a device; fewer packs use fewer devices."""
        (packs,) = inputs
        assert 1 <= len(packs) <= len(device_ids), "a round has at most a pack for each device"
        scattered = [
            (pack.to(torch.device("cuda", device)),)
            for pack, device in zip(packs, device_ids, strict=False)
        ]
        return scattered, [dict(kwargs or {}) for _ in packs]

    def gather(self, outputs: Any, output_device: Any) -> list[LossSum]:
        """The loss sums on one device; numbers of targets need no moving."""
        device = torch.device("cuda", output_device)
        return [LossSum(nats=one.nats.to(device), num_targets=one.num_targets) for one in outputs]

    def forward(self, *inputs: Any, **kwargs: Any) -> list[LossSum]:
        """The packs' loss sums, in their order."""
        if len(inputs[0]) == 1:  # torch would not gather what one device returns
            return [self.module(inputs[0][0].to(self.src_device_obj), **kwargs)]
        found: list[LossSum] = super().forward(*inputs, **kwargs)
        return found


class CpuReplicas(nn.Module):
    """What DataParallel does, on the CPU: to test and to show its arithmetic without GPUs.

    Each pack meets its own copy of the parameters, and the copies' gradients are added in the order
    of the devices.
    """

    def __init__(self, module: nn.Module) -> None:
        """Replicate `module` for every pack of a round."""
        super().__init__()
        self.module = module

    def forward(self, packs: Sequence[Any], *, dropout_seed: int | None) -> list[LossSum]:
        """The packs' loss sums, in their order."""
        # A copy of a frozen parameter would ask for a gradient.
        trained = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        names, parameters = zip(*trained, strict=True)
        copies = _Broadcast.apply(len(packs), *parameters)  # type: ignore[no-untyped-call]
        results: list[LossSum] = []
        for i, pack in enumerate(packs):
            mine = copies[i * len(names) : (i + 1) * len(names)]
            results.append(
                functional_call(
                    self.module,
                    dict(zip(names, mine, strict=True)),
                    (pack,),
                    {"dropout_seed": dropout_seed},
                )
            )
        return results


class _Broadcast(torch.autograd.Function):
    """Copies of tensors for each device; backward adds the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, copies: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.num_tensors = copies, len(tensors)
        return tuple(t.clone() for _ in range(copies) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        each = [grads[i * ctx.num_tensors : (i + 1) * ctx.num_tensors] for i in range(ctx.copies)]
        sums = list(each[0])
        for more in each[1:]:
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return (None, *sums)
