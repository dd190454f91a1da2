"""The machine's own limit, as a worker: matrix products on the shapes of one encoder block.

A "step" here is one round over all products of a block, forward and backward (x @ W', dY @ W,
dY' @ X for each weight), into outputs that are in use already. Its rate is the bound that a
training step of the same width is measured against, taken in turns with it.
"""

import argparse
import time
from collections.abc import Iterator

import torch

from interleave import Step, serve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden", type=int, required=True)
parser.add_argument("--tokens", type=int, required=True)
parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
args = parser.parse_args()
dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32

products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
flop = 0.0
h = args.hidden
for rows_in, rows_out in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)):
    inputs = torch.randn(args.tokens, rows_in).to(dtype)
    weight = torch.randn(rows_out, rows_in).to(dtype)
    grads = torch.randn(args.tokens, rows_out).to(dtype)
    for left, right in ((inputs, weight.t()), (grads, weight), (grads.t(), inputs)):
        products.append((left, right, left @ right))
        flop += 2.0 * args.tokens * rows_in * rows_out


def steps() -> Iterator[Step]:
    """One round over all products each."""
    while True:
        started = time.perf_counter()
        for left, right, output in products:
            torch.mm(left, right, out=output)
        seconds = time.perf_counter() - started
        yield Step(seconds=seconds, tokens=args.tokens, examples=0, useful_flop=flop, loss=0.0)


serve({"threads": torch.get_num_threads(), "torch": torch.__version__}, steps())
