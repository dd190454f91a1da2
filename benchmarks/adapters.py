"""What LoRA and frozen layers save and cost against training all weights, on one machine, in turns.

    python benchmarks/adapters.py [--model bert-base] [--sequences 8] [--tokens 128] [--turns 7]

One classifier a way; each turn runs one whole optimizer step of every way, so all see the same
machine. The peak is of tensors: weights, optimizer, activations and all that lives within a step,
counted in torch's allocator (kernels' scratch is not seen). Writes a table and JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from bertsmith.batch import LabelledBatch, StepShare, pack
from bertsmith.model.compact import CompactVocabulary
from bertsmith.model.config import (
    LORA_DEFAULT_TARGETS,
    LORA_TARGETS,
    PRESETS,
    EncoderConfig,
    LoraConfig,
)
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.model.lora import attach, freeze_encoder
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.recipes.trained_parts import freeze
from bertsmith.train.config import OptimConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from live_bytes import counted, phase

RESULTS = Path(__file__).parent / "results"
LABELS = 8
KNOWN_TOKENS = 4000
"""Types that occur: of a whole model only their rows of the token table are trained."""

WAYS = ("all weights", "upper half", "LoRA 8", "LoRA 8, every product", "LoRA 8, dropout 0.1")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way."""

    way: str
    trained_parameters: int
    peak_bytes: int
    """Of tensors, within a step: weights, moments, gradients and activations."""

    checkpoint_bytes: int
    """Of the weights that change and their two moments, as a checkpoint has to hold them."""

    step_seconds: float
    """Median."""

    of_all_weights: float
    """Median over the turns of this step's seconds over those of all weights."""

    seconds: list[float]


def new_step(
    way: str, shape: EncoderConfig, batch: LabelledBatch, compute: Compute
) -> tuple[Callable[[], None], int]:
    """A function that runs one optimizer step, and how many parameters it trains."""
    model = SequenceClassifier(shape, num_labels=LABELS)
    initialize(model, config=shape, seed=0)
    if way.startswith("LoRA"):
        targets = LORA_TARGETS if "every" in way else LORA_DEFAULT_TARGETS
        dropout = 0.1 if "dropout" in way else 0.0
        attach(model, LoraConfig(rank=8, dropout=dropout, targets=list(targets)), seed=0)
        freeze_encoder(model, trained=("classifier",))
    elif way == "upper half":
        half = shape.num_hidden_layers // 2
        freeze(f"embeddings,0-{half - 1}", model, num_layers=shape.num_hidden_layers)
    else:
        batch = CompactVocabulary(model.encoder, torch.arange(KNOWN_TOKENS)).narrowed(batch)
    strategy = Strategy(model, World())
    optimizer = AdamW(group_parameters(model, OptimConfig()), OptimConfig())
    steps = iter(range(10**9))

    def step() -> None:
        train_step(
            strategy,
            StepShare.of_all([batch]),
            optimizer,
            compute=compute,
            scaler=None,
            step=next(steps),
            seed=0,
            learning_rate=1e-4,
            max_grad_norm=1.0,
        )

    return step, sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()

    reuse_freed_memory()
    shape = PRESETS[args.model]
    dtype = torch.float32 if args.precision == "fp32" else torch.bfloat16
    compute = Compute(device=torch.device("cpu"), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = pack(
        [
            torch.randint(5, KNOWN_TOKENS, (args.tokens,), generator=generator)
            for _ in range(args.sequences)
        ]
    )
    rows_N = torch.arange(args.sequences)
    batch = LabelledBatch(inputs=inputs, labels_N=rows_N % LABELS, rows_N=rows_N)

    peaks: dict[str, int] = {}
    steps: dict[str, Callable[[], None]] = {}
    trained: dict[str, int] = {}
    for way in WAYS:
        with counted() as found:
            steps[way], trained[way] = new_step(way, shape, batch, compute)
            phase("step", steps[way])
        peaks[way] = found.phase_peaks_bytes["step"]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(args.turns):
        for way, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - started)
        told = ", ".join(f"{way} {values[-1]:.2f} s" for way, values in seconds.items())
        print(f"turn {turn + 1}: {told}", file=sys.stderr, flush=True)
    rows = [
        Row(
            way=way,
            trained_parameters=trained[way],
            peak_bytes=peaks[way],
            checkpoint_bytes=12 * trained[way],
            step_seconds=statistics.median(seconds[way]),
            of_all_weights=statistics.median(
                a / b for a, b in zip(seconds[way], seconds[WAYS[0]], strict=True)
            ),
            seconds=[round(s, 4) for s in seconds[way]],
        )
        for way in WAYS
    ]
    write(rows, args)


def write(rows: list[Row], args: argparse.Namespace) -> None:
    """The table and JSON."""
    stem = f"adapters_{os.cpu_count()}-core-cpu_{datetime.now(UTC):%Y-%m-%d}"
    lines = [
        f"# LoRA and frozen layers against all weights: {args.model}, {args.precision}",
        "",
        f"`python benchmarks/adapters.py --model {args.model} --sequences {args.sequences} "
        f"--tokens {args.tokens} --turns {args.turns} --precision {args.precision}`: "
        f"{args.sequences} sequences of {args.tokens} tokens a step, {torch.get_num_threads()} "
        f"threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}. Whole "
        "optimizer steps, dropout 0.1; medians, the last column over the turns.",
        "",
        "| way | trained | peak of tensors | in a checkpoint | step | of all weights |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.way} | {r.trained_parameters:,} | {r.peak_bytes / 2**20:,.0f} MiB | "
        f"{r.checkpoint_bytes / 2**20:,.0f} MiB | {r.step_seconds:.2f} s | {r.of_all_weights:.2f} |"
        for r in rows
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / f"{stem}.md").write_text(text, encoding="utf-8")
    content = {"settings": vars(args), "rows": [asdict(r) for r in rows]}
    (RESULTS / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
