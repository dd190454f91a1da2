"""Devices by name: how much memory, how fast, how much power, and who says so.

Rates are of dense matrix products as the vendor publishes them; memory is what nvidia-smi shows,
which is a little less than the number on the box. None of it was measured by us.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bertsmith.errors import UserError
from bertsmith.memory.shapes import DeviceKind, NumberFormat

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Something that trains."""

    name: str

    memory_bytes: int

    kind: DeviceKind = "cuda"

    tflop_per_second: Mapping[NumberFormat, float] | None = None
    """Of matrix products, by format; one that is missing cannot be computed. None: not known."""

    watts: float | None = None
    """At full load; None: not known."""

    source: str
    """Where the numbers are from."""

    def computes(self, number_format: NumberFormat) -> bool:
        """Whether it has arithmetic for a format, as far as known."""
        return self.tflop_per_second is None or number_format in self.tflop_per_second


def _gpu(
    name: str, memory_mib: int, fp32: float, half: float, watts: float, source: str, *, bf16: bool
) -> Device:
    rates: dict[NumberFormat, float] = {"fp32": fp32, "fp16": half}
    if bf16:
        rates["bf16"] = half
    return Device(
        name=name,
        memory_bytes=memory_mib * MIB,
        tflop_per_second=rates,
        watts=watts,
        source=source,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("h200", 143_771, 67.0, 989.0, 700, "NVIDIA H200 datasheet, SXM", bf16=True),
        _gpu("h100", 81_559, 67.0, 989.0, 700, "NVIDIA H100 datasheet, SXM", bf16=True),
        _gpu("a100-80", 81_920, 19.5, 312.0, 400, "NVIDIA A100 datasheet, SXM", bf16=True),
        _gpu("a100-40", 40_960, 19.5, 312.0, 400, "NVIDIA A100 datasheet, SXM", bf16=True),
        _gpu("l40s", 46_068, 91.6, 362.0, 350, "NVIDIA L40S datasheet", bf16=True),
        _gpu("l4", 23_034, 30.3, 121.0, 72, "NVIDIA L4 datasheet", bf16=True),
        _gpu("a10", 23_028, 31.2, 125.0, 150, "NVIDIA A10 datasheet", bf16=True),
        _gpu("t4", 15_360, 8.1, 65.0, 70, "NVIDIA T4 datasheet", bf16=False),
        _gpu("v100", 16_384, 15.7, 125.0, 300, "NVIDIA V100 datasheet, SXM2 16 GB", bf16=False),
        _gpu("rtx-4090", 24_564, 82.6, 165.2, 450, "NVIDIA Ada architecture paper", bf16=True),
        _gpu("rtx-3090", 24_576, 35.6, 71.0, 350, "NVIDIA GA102 architecture paper", bf16=True),
        _gpu("rtx-3070", 8_192, 20.3, 40.6, 220, "NVIDIA GA102 architecture paper", bf16=True),
    )
}
"""Half precision is with fp32 accumulation and without sparsity."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|MB|GB)", re.IGNORECASE)
_UNITS = {"mib": MIB, "gib": GIB, "mb": 10**6, "gb": 10**9}


def named_device(name: str) -> Device:
    """A device of the table, or one of so much memory: `16GiB`.

    Raises:
        UserError: It is neither.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    size = _SIZE.fullmatch(name.strip())
    if size is not None and float(size[1]) > 0.0:
        num_bytes = int(float(size[1]) * _UNITS[size[2].lower()])
        return Device(name=name, memory_bytes=num_bytes, source="as given")
    known = [*DEVICES, "this"]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]}?" if near else ";"
    raise UserError(
        f"--device {name}: not known{meant} known are {', '.join(known)}, and any amount of "
        "memory, such as 16GiB"
    )


def said_bytes(num_bytes: int) -> str:
    """GiB, or MiB below one."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB"
