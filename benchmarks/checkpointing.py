"""What activation checkpointing saves and costs, on one machine, in turns.

One model, one pack; each turn runs whole optimizer steps in every mode, so all modes see the same
machine. The first step of a mode in a turn is left out where there are more: it finds a heap laid
out for another mode, and a run stays in its own. Bytes are counted, not sampled: storages that
autograd holds for the backward pass at the end of a forward pass, parameters left out. Writes a
table, JSON, and a plot where matplotlib is installed.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bertsmith.batch import MaskedBatch, pack
from bertsmith.model.checkpointing import BlockMode, Body, block_modes, parse_checkpointing
from bertsmith.model.config import PRESETS
from bertsmith.model.fused import fused_library
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.train.config import OptimConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from live_bytes import held_for_backward

VALUES = ("none", "selective", "budget:0.5", "every:2", "full")
RESULTS = Path(__file__).parent / "results"
MASKED_SHARE = 0.15
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mode."""

    checkpointing: str
    blocks: str
    held_bytes: int
    """At the end of a forward pass, for the whole model."""

    held_by_blocks_bytes: int
    held_share: float
    """Of what blocks hold without checkpointing."""

    step_seconds: float
    """Median."""

    more_time: float
    """Median over the turns of this step's seconds over those of `none`, less 1."""

    seconds: list[float]


def made_up_pack(vocab_size: int, *, sequences: int, tokens: int) -> MaskedBatch:
    """Random tokens in sequences of one length."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(999, vocab_size, (tokens,), generator=generator) for _ in range(sequences)]
    total = sequences * tokens
    positions_M = torch.randperm(total, generator=generator)[: round(MASKED_SHARE * total)].sort()[
        0
    ]
    targets_M = torch.randint(999, vocab_size, (len(positions_M),), generator=generator)
    return MaskedBatch(inputs=pack(ids), positions_M=positions_M, targets_M=targets_M)


def said_blocks(modes: tuple[BlockMode, ...]) -> str:
    """How many blocks are of each mode."""
    return ", ".join(f"{modes.count(m)} {m}" for m in dict.fromkeys(modes))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of each mode in a turn")
    parser.add_argument("--values", nargs="+", default=list(VALUES))
    parser.add_argument("--name", default="checkpointing", help="of the files to write")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="processor: with OMP_NUM_THREADS=1, where other jobs share the machine",
    )
    args = parser.parse_args()
    clock = CLOCKS[args.clock]

    reuse_freed_memory()
    shape = PRESETS[args.model]
    if args.layers is not None:
        shape = replace(shape, num_hidden_layers=args.layers)
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=0)
    optim = OptimConfig()
    optimizer = AdamW(group_parameters(model, optim), optim)
    batch = made_up_pack(shape.vocab_size, sequences=args.sequences, tokens=args.tokens)
    is_fused = fused_library(model.encoder.embeddings.token.weight) is not None
    body = Body(is_fused=is_fused, element_bytes=4, sequence_tokens=args.tokens)
    picked = {v: block_modes(parse_checkpointing(v), shape, body) for v in args.values}

    def step(modes: tuple[BlockMode, ...]) -> float:
        model.encoder.checkpoint_blocks(modes)
        started = clock()
        loss = model(batch, dropout_seed=1)
        (loss.nats / loss.num_targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return clock() - started

    counts: dict[str, tuple[int, int]] = {}
    for value, modes in picked.items():
        model.encoder.checkpoint_blocks(modes)
        with held_for_backward() as all_of_it:
            model(batch, dropout_seed=1)
        with held_for_backward() as blocks:
            model.encoder(batch.inputs, dropout_seed=1, rows_M=batch.positions_M)
        counts[value] = (sum(all_of_it.values()), sum(blocks.values()))
        step(modes)  # warm-up
    seconds: dict[str, list[float]] = {value: [] for value in picked}
    for turn in range(args.turns):
        for value, modes in picked.items():
            steps = [step(modes) for _ in range(args.steps)]
            seconds[value].append(statistics.median(steps[1:] or steps))
        print(
            f"turn {turn + 1}: " + ", ".join(f"{v} {s[-1]:.2f} s" for v, s in seconds.items()),
            file=sys.stderr,
            flush=True,
        )
    rows = [
        Row(
            checkpointing=value,
            blocks=said_blocks(modes),
            held_bytes=counts[value][0],
            held_by_blocks_bytes=counts[value][1],
            held_share=counts[value][1] / counts["none"][1],
            step_seconds=statistics.median(seconds[value]),
            more_time=statistics.median(
                a / b for a, b in zip(seconds[value], seconds["none"], strict=True)
            )
            - 1.0,
            seconds=[round(s, 4) for s in seconds[value]],
        )
        for value, modes in picked.items()
    ]
    facts = {
        "command": shlex.join(["python", "benchmarks/checkpointing.py", *sys.argv[1:]]),
        "model": args.model,
        "layers": shape.num_hidden_layers,
        "pack": f"{args.sequences} sequences of {args.tokens} tokens, {MASKED_SHARE:.0%} predicted",
        "body": "C kernels" if is_fused else "plain torch (BERTSMITH_KERNELS=off)",
        "precision": "fp32",
        "turns": args.turns,
        "steps_a_turn": args.steps,
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    write(rows, facts, name=args.name)


def write(rows: list[Row], facts: dict[str, object], *, name: str) -> None:
    """The table, JSON, and a plot if that is possible."""
    stem = f"{name}_{os.cpu_count()}-core-cpu_{datetime.now(UTC):%Y-%m-%d}"
    lines = [
        f"# Activation checkpointing: {facts['model']}, {facts['layers']} blocks, fp32",
        "",
        f"`{facts['command']}`: {facts['pack']}; dropout 0.1; {facts['body']}; "
        f"{facts['threads']} thread(s), {facts['cpu_capability']}, torch {facts['torch']}. "
        f"Whole optimizer steps, {facts['turns']} turns of {facts['steps_a_turn']} step(s) in each "
        f"mode, of which the first is left out if there are more, by the {facts['clock']} clock; "
        "more time is the median over the turns of the ratio to `none`. Bytes are storages that "
        "autograd holds at the end of the forward pass, parameters left out: of the encoder with "
        "its embeddings, and of the whole model (with the head's logits).",
        "",
        "| checkpointing | blocks | encoder holds | share | cut | model holds | step | more time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.checkpointing} | {r.blocks} | {r.held_by_blocks_bytes / 2**20:,.0f} MiB | "
        f"{r.held_share:.3f} | {1 / r.held_share:.1f}x | {r.held_bytes / 2**20:,.0f} MiB | "
        f"{r.step_seconds:.2f} s | {r.more_time:+.1%} |"
        for r in rows
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / f"{stem}.md").write_text(text, encoding="utf-8")
    content = json.dumps({"facts": facts, "rows": [asdict(r) for r in rows]}, indent=1)
    (RESULTS / f"{stem}.json").write_text(content + "\n", encoding="utf-8")
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots()
    axes.plot([r.held_share for r in rows], [100 * r.more_time for r in rows], "o")
    for r in rows:
        axes.annotate(r.checkpointing, (r.held_share, 100 * r.more_time))
    axes.set(xlabel="share of activations held", ylabel="more time a step, %", xlim=(0, 1.1))
    figure.savefig(RESULTS / f"{stem}.png")


if __name__ == "__main__":
    main()
