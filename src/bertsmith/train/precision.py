"""Which device and number format a run computes in, chosen from the hardware.

Parameters, gradients and optimizer state stay fp32; a precision is the format of matrix products
and activations (autocast). LayerNorm statistics, softmax and losses are fp32 in each.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from bertsmith.errors import UserError
from bertsmith.memory.here import cpu_computes_bf16
from bertsmith.train.config import Precision
from bertsmith.train.memory_reuse import bound_compiled_products, use_huge_pages

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and in what format a model runs."""

    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """fp32, bf16 or fp16."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which a forward pass computes in this format."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )


def choose_compute(precision: Precision, device: DeviceName, *, local_rank: int = 0) -> Compute:
    """Resolve `auto`, and speed up fp32 products where that costs no accuracy.

    auto is bf16 on a GPU that computes it (else fp16), and on a CPU with bf16 instructions; fp32
    on any other CPU, where bf16 is emulated and slow.

    Args:
        precision: Asked for.
        device: Asked for.
        local_rank: Which of several GPUs.

    Raises:
        UserError: A GPU is asked for and there is none, or the device cannot compute bf16.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU can be used here; use --device cpu")
    name = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(name, local_rank) if name == "cuda" else torch.device(name)
    if precision == "auto":
        if chosen.type == "cuda":
            precision = "bf16" if gpu_computes_bf16() else "fp16"
        else:
            precision = "bf16" if cpu_computes_bf16() else "fp32"
    if precision == "bf16" and chosen.type == "cuda" and not gpu_computes_bf16():
        raise UserError("--precision bf16: this GPU does not compute bf16; use fp16 or fp32")
    if precision == "bf16" and chosen.type == "cpu" and not cpu_computes_bf16():
        raise UserError(
            "--precision bf16: this CPU has no bf16 instructions, and emulating them would be "
            "hundreds of times slower; use fp32"
        )
    if chosen.type == "cpu":
        bound_compiled_products()
        use_huge_pages()
        _use_onednn_for_fp32()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return Compute(device=chosen, dtype=dtype)


def gpu_computes_bf16() -> bool:
    """Whether the GPU has bf16 arithmetic; torch's own answer counts emulation, which is slow."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _use_onednn_for_fp32() -> None:
    """Send fp32 products to oneDNN where it is faster and keeps fp32 accuracy.

    torch calls that precision "medium". On AMD CPUs with AVX-512 it is twice as fast as MKL (466
    against 220 GFLOP/s), on one with AVX2 alone slower (83 against 101). Not timed here: two runs
    could choose otherwise, and would no longer be the same to the bit. On a CPU with AMX it rounds
    the inputs to bf16, so the error is looked at first (fp32 sums of 512 terms err near 1e-6, bf16
    inputs near 3e-3).
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, 512, generator=generator)
    right = torch.randn(512, 64, generator=generator)
    exact = left.double() @ right.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
    if float(error) > 1e-5:
        torch.set_float32_matmul_precision(before)
