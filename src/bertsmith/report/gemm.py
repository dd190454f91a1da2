"""The machine's own limit: how fast it multiplies matrices of the shapes that training uses."""

import time

import torch

from bertsmith.model.config import EncoderConfig
from bertsmith.train.micro_batch import is_out_of_memory
from bertsmith.train.precision import Compute


def gemm_flop_per_second(
    config: EncoderConfig, *, tokens: int, compute: Compute, seconds: float = 0.3
) -> float:
    """Rate over all matrix products of one block, forward and backward, as autograd runs them.

    Args:
        config: Shape of the encoder.
        tokens: Rows of the products: tokens of a pack.
        compute: Device and format.
        seconds: About how long to measure.
    """
    while True:
        try:
            return _measure(config, tokens=tokens, compute=compute, seconds=seconds)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or tokens < 2:
                raise
        tokens //= 2  # a little less of a limit, and the run may still fit


def _measure(config: EncoderConfig, *, tokens: int, compute: Compute, seconds: float) -> float:
    width, inner = config.hidden_size, config.intermediate_size
    shapes = ((width, 3 * width), (width, width), (width, inner), (inner, width))
    flop = elapsed = 0.0
    for rows_in, rows_out in shapes:
        inputs = torch.randn(tokens, rows_in, device=compute.device).to(compute.dtype)
        weight = torch.randn(rows_out, rows_in, device=compute.device).to(compute.dtype)
        grads = torch.randn(tokens, rows_out, device=compute.device).to(compute.dtype)
        for left, right in ((inputs, weight.t()), (grads, weight), (grads.t(), inputs)):
            output = left @ right
            elapsed += _fastest(left, right, output, seconds=seconds / 12.0)
            flop += 2.0 * tokens * rows_in * rows_out
    return flop / elapsed


def _fastest(
    left: torch.Tensor, right: torch.Tensor, output: torch.Tensor, *, seconds: float
) -> float:
    """Fewest seconds that the product took: a limit is not an average."""
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        torch.mm(left, right, out=output)
        if output.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        fastest = min(fastest, now - started)
        if now >= end:
            return fastest
