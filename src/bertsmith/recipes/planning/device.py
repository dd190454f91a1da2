"""The device that is planned for: one by name, or what this machine has."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertsmith.errors import UserError
from bertsmith.memory.devices import DEVICES, Device, named_device, said_bytes
from bertsmith.memory.here import (
    Taken,
    cpu_computes_bf16,
    cpu_limit,
    gpu_processes,
    gpus_here,
    largest_processes,
)
from bertsmith.memory.shapes import NumberFormat

BF16_SPEEDUP = 4.0
"""Of a CPU that has bf16 instructions, over fp32: measured on one (docs/experiments.md)."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device, and what of it can be used."""

    device: Device
    why: str
    """Where the limit is from."""

    taken: Sequence[Taken] = ()
    """What others hold of it."""

    count: int = 1
    """Devices of this kind that are here."""

    has_kernels: bool = False

    @property
    def half_format(self) -> NumberFormat | None:
        """The 16-bit format that a run would use on it; None: none is quick there."""
        if self.device.kind == "cpu":
            return "bf16" if cpu_computes_bf16() else None
        return "bf16" if self.device.computes("bf16") else "fp16"

    @property
    def speedup(self) -> float:
        """Of the 16-bit format over fp32."""
        rates, half = self.device.tflop_per_second, self.half_format
        if rates is None or half is None:
            return BF16_SPEEDUP
        return rates[half] / rates["fp32"]

    def format_of(self, precision: str) -> NumberFormat:
        """What a `--precision` comes to.

        Raises:
            UserError: The device has no arithmetic for the format.
        """
        if precision == "auto":
            return self.half_format or "fp32"
        number_format: NumberFormat = precision  # type: ignore[assignment]  # auto is dealt with
        if not self.device.computes(number_format):
            raise UserError(
                f"--precision {precision}: {self.device.name} does not compute it; use fp16"
            )
        return number_format


def target_of(name: str) -> Target:
    """A device by name; `this`, `auto`, `cpu` and `cuda` are what this machine has.

    Raises:
        UserError: It is not known, or there is no GPU.
    """
    if name not in ("this", "auto", "cpu", "cuda"):
        device = named_device(name)
        return Target(device=device, why=device.source)
    gpus = [] if name == "cpu" else gpus_here()
    if gpus:
        free = [gpu.total_bytes - gpu.used_bytes for gpu in gpus]
        gpu = gpus[free.index(min(free))]
        known = published(gpu.name)
        device = (
            Device(name=gpu.name, memory_bytes=min(free), source="nvidia-smi")
            if known is None
            else replace(known, name=gpu.name, memory_bytes=min(free))
        )
        why = f"{said_bytes(gpu.total_bytes)}, {said_bytes(gpu.used_bytes)} of it taken"
        return Target(device=device, why=why, taken=gpu_processes(), count=len(gpus))
    if name == "cuda":
        raise UserError("--device cuda: nvidia-smi shows no GPU here; name one, such as a100-40")
    limit = cpu_limit()
    device = Device(
        name="this CPU", kind="cpu", memory_bytes=limit.num_bytes, source="measured here"
    )
    return Target(
        device=device, why=limit.why, taken=largest_processes(), has_kernels=has_kernels()
    )


def published(gpu_name: str) -> Device | None:
    """The device of the table that nvidia-smi means, such as "NVIDIA A100-SXM4-80GB"."""
    name = gpu_name.lower().replace(" ", "-").replace("geforce-", "")
    words = name.split("-")
    for known, device in DEVICES.items():
        model, _, size = known.partition("-")
        if model == "rtx":
            if known in name and not name.endswith(("-ti", "-super", "-laptop-gpu")):
                return device
        elif model in words and (not size or f"{size}gb" in name):
            return device
    return None


def has_kernels() -> bool:
    """Whether `model.kernels.build` will find a compiler."""
    if os.environ.get("BERTSMITH_KERNELS", "on").lower() in ("off", "0", "no"):
        return False
    return shutil.which(os.environ.get("CC", "cc")) is not None
