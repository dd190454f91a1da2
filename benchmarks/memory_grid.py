"""The planner held to the truth: planned against measured peaks over a grid of runs.

    python benchmarks/memory_grid.py [--only PART-OF-A-NAME] [--write]

Each run is a process of its own: a real model, real packs of made-up tokens, `train_step`, an
evaluation and a snapshot as a verb makes them. Measured is what torch's allocator has given out
(`live_bytes`), and beside it the resident memory that the process gained. An error above 0 means
that more was planned than was needed. bf16 runs only where it is quick: this machine may have to
emulate it, so those shapes are tiny (the bytes are the same).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bertsmith.memory.formula import plan_memory
from bertsmith.memory.shapes import Adapters, Body, NumberFormat, RunShape, Task
from bertsmith.model.checkpointing import BlockMode, block_modes, parse_checkpointing
from bertsmith.model.checkpointing import Body as BlockBody
from bertsmith.model.config import LORA_TARGETS, PRESETS, EncoderConfig, LoraConfig

HERE = Path(__file__).parent
WITHIN, UNDER = 0.10, 0.03
"""The bounds: planned within 10 % of measured, and never more than 3 % under."""

BERT_ROWS, FINETUNED_ROWS, LABELS, RANK = 30522, 4000, 3, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the grid."""

    model: str
    task: Task = "masked_lm"
    tokens: int
    longest: int
    number_format: NumberFormat = "fp32"
    dropout: float = 0.1
    body: Body = "kernels"
    packs: int = 1
    vocabulary: int = BERT_ROWS
    checkpointing: str = "none"
    lora: tuple[str, ...] = ()
    """Targets of adapters of rank 8, which stand on a base with a pooler; none: no adapters."""

    lora_dropout: float = 0.0

    @property
    def modes(self) -> tuple[BlockMode, ...]:
        """What each block keeps."""
        asked = parse_checkpointing(self.checkpointing)
        size = 4 if self.number_format == "fp32" else 2
        blocks = BlockBody(is_fused=self.body == "kernels" and not self.lora, element_bytes=size)
        return block_modes(asked, self.encoder, blocks)

    @property
    def name(self) -> str:
        """Says all of it."""
        head = "mlm" if self.task == "masked_lm" else "classifier"
        return (
            f"{self.model.removeprefix('bert-')} {head} {self.tokens}x{self.packs} "
            f"longest {self.longest} {self.number_format} dropout {self.dropout:g} "
            f"{self.body} {self.checkpointing}"
        ) + (f" lora {'+'.join(self.lora)} {self.lora_dropout:g}" if self.lora else "")

    @property
    def encoder(self) -> EncoderConfig:
        """Of its model."""
        return replace(
            PRESETS[self.model],
            vocab_size=self.vocabulary,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )

    @property
    def shape(self) -> RunShape:
        """What the planner is told."""
        is_mlm = self.task == "masked_lm"
        return RunShape(
            encoder=self.encoder,
            task=self.task,
            tokens_per_pack=self.tokens,
            longest=self.longest,
            read_share=0.15 if is_mlm else 1.0 / self.longest,
            num_labels=LABELS,
            trained_rows=None if is_mlm or self.lora else FINETUNED_ROWS,
            adapters=Adapters(
                rank=RANK,
                targets=self.lora,
                drops=self.lora_dropout > 0.0,
                trains_pooler=False,
            )
            if self.lora
            else None,
            number_format=self.number_format,
            body=self.body,
            packs_per_step=self.packs,
            block_modes=self.modes,
            threads=os.cpu_count() or 1,
        )


def cases() -> list[Case]:
    """The grid."""
    grid = [
        Case(model=model, tokens=tokens, longest=longest)
        for model, sizes in {
            "bert-tiny": (512, 2048, 8192),
            "bert-mini": (512, 4096),
            "bert-small": (512, 2048, 4096),
            "bert-medium": (1024, 2048),
            "bert-base": (512, 2048),
        }.items()
        for tokens in sizes
        for longest in ((64, 512) if model == "bert-tiny" else (128 if tokens < 2048 else 512,))
    ]
    grid += [
        Case(model=model, task="classifier", tokens=tokens, longest=longest)
        for model, tokens, longest in (
            ("bert-tiny", 2048, 64),
            ("bert-mini", 2048, 128),
            ("bert-small", 512, 64),
            ("bert-small", 4096, 256),
            ("bert-medium", 2048, 512),
            ("bert-base", 512, 128),
            ("bert-base", 2048, 512),
        )
    ]
    grid += [
        Case(model=model, tokens=tokens, longest=128, dropout=0.0)
        for model, tokens in (("bert-tiny", 2048), ("bert-small", 2048), ("bert-base", 512))
    ]
    grid += [
        Case(model=model, tokens=tokens, longest=256, packs=3)
        for model, tokens in (("bert-tiny", 1024), ("bert-small", 2048), ("bert-base", 512))
    ]
    grid.append(Case(model="bert-base", task="classifier", tokens=512, longest=64, packs=2))
    emulated: list[tuple[Task, int, int, float]] = [
        ("masked_lm", 256, 64, 0.1),
        ("masked_lm", 512, 128, 0.1),
        ("masked_lm", 512, 512, 0.0),
        ("classifier", 512, 64, 0.1),
        ("classifier", 1024, 512, 0.1),
    ]
    grid += [  # emulated bf16: few tokens, few rows of the table
        Case(
            model="bert-tiny",
            task=task,
            tokens=tokens,
            longest=longest,
            number_format="bf16",
            dropout=dropout,
            vocabulary=8192,
        )
        for task, tokens, longest, dropout in emulated
    ]
    plain: list[tuple[str, Task, int, int, float]] = [
        ("bert-tiny", "masked_lm", 2048, 128, 0.1),
        ("bert-tiny", "masked_lm", 2048, 128, 0.0),
        ("bert-tiny", "masked_lm", 16384, 64, 0.0),  # logits in chunks, as in 8192 on the kernels
        ("bert-tiny", "classifier", 2048, 256, 0.1),
        ("bert-small", "masked_lm", 1024, 64, 0.1),
        ("bert-small", "masked_lm", 1024, 512, 0.1),
        ("bert-small", "masked_lm", 2048, 512, 0.0),
        ("bert-small", "classifier", 1024, 128, 0.0),
        ("bert-base", "masked_lm", 512, 128, 0.1),
        ("bert-base", "masked_lm", 512, 128, 0.0),
    ]
    grid += [
        Case(model=model, task=task, tokens=tokens, longest=longest, dropout=dropout, body="plain")
        for model, task, tokens, longest, dropout in plain
    ]
    grid += [
        Case(model=model, tokens=tokens, longest=longest, checkpointing=checkpointing)
        for model, tokens, longest in (("bert-medium", 1024, 128), ("bert-small", 2048, 512))
        for checkpointing in ("selective", "full", "every:2", "budget:0.4")
    ]
    grid += [
        Case(
            model="bert-small",
            task="classifier",
            tokens=2048,
            longest=128,
            checkpointing=checkpointing,
            body=body,
        )
        for checkpointing in ("selective", "full")
        for body in ("kernels", "plain")
    ]
    grid += [
        Case(
            model="bert-tiny",
            tokens=512,
            longest=128,
            number_format="bf16",
            vocabulary=8192,
            checkpointing=checkpointing,
        )
        for checkpointing in ("selective", "full")
    ]
    query_value = ("query", "value")
    of_lora: list[tuple[str, int, int, tuple[str, ...], dict[str, Any]]] = [
        ("bert-tiny", 2048, 128, query_value, {}),
        ("bert-tiny", 2048, 128, LORA_TARGETS, {"lora_dropout": 0.1}),
        ("bert-tiny", 2048, 128, ("inner",), {"dropout": 0.0}),
        ("bert-tiny", 1024, 512, query_value, {"body": "plain"}),
        ("bert-mini", 2048, 128, query_value, {"dropout": 0.0}),
        ("bert-mini", 2048, 128, ("attention_out", "inner_out"), {"packs": 2}),
        ("bert-mini", 4096, 128, query_value, {"checkpointing": "full"}),
        ("bert-mini", 4096, 128, query_value, {"checkpointing": "selective"}),
        ("bert-small", 2048, 128, query_value, {}),
        ("bert-small", 2048, 128, LORA_TARGETS, {}),
        ("bert-small", 1024, 128, query_value, {"body": "plain"}),
        ("bert-base", 512, 128, query_value, {}),
    ]
    grid += [
        Case(model=model, task="classifier", tokens=tokens, longest=longest, lora=targets, **more)
        for model, tokens, longest, targets, more in of_lora
    ]
    return grid


def measure(case: Case) -> dict[str, Any]:  # noqa: PLR0915 - one run, top to bottom
    """Run one case in this process."""
    import torch

    from bertsmith.batch import LabelledBatch, MaskedBatch, StepShare, pack
    from bertsmith.checkpoint.saver import Snapshot
    from bertsmith.model.compact import CompactVocabulary
    from bertsmith.model.heads import MaskedLM, SequenceClassifier
    from bertsmith.model.lora import attach, freeze_encoder
    from bertsmith.parallel.strategies import Strategy
    from bertsmith.parallel.world import World
    from bertsmith.train.config import OptimConfig
    from bertsmith.train.memory_reuse import reuse_freed_memory
    from bertsmith.train.optim import AdamW, group_parameters
    from bertsmith.train.precision import Compute
    from bertsmith.train.step import train_step
    from bertsmith.train.validation import score_masked_lm
    from live_bytes import counted, phase

    reuse_freed_memory()
    compute = Compute(
        device=torch.device("cpu"),
        dtype=torch.float32 if case.number_format == "fp32" else torch.bfloat16,
    )
    generator = torch.Generator().manual_seed(0)
    is_mlm = case.task == "masked_lm"
    highest = case.vocabulary if is_mlm else FINETUNED_ROWS

    def new_pack() -> Any:
        sequences = [
            torch.randint(5, highest, (case.longest,), generator=generator)
            for _ in range(case.tokens // case.longest)
        ]
        inputs = pack(sequences)
        if not is_mlm:
            labels_N = torch.zeros(len(sequences), dtype=torch.int64)
            return LabelledBatch(
                inputs=inputs, labels_N=labels_N, rows_N=torch.arange(len(sequences))
            )
        count = case.shape.num_read(case.tokens)
        positions_M = torch.randperm(case.tokens, generator=generator)[:count].sort().values
        return MaskedBatch(
            inputs=inputs,
            positions_M=positions_M,
            targets_M=torch.zeros(count, dtype=torch.int64),
        )

    torch.randn(256, 256) @ torch.randn(256, 256)  # libraries are loaded
    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    packs = [new_pack() for _ in range(case.packs)]
    with counted() as found:
        model: Any = (
            MaskedLM(case.encoder)
            if is_mlm
            else SequenceClassifier(case.encoder, num_labels=LABELS)
        )
        if case.lora:
            config = LoraConfig(rank=RANK, dropout=case.lora_dropout, targets=list(case.lora))
            attach(model, config, seed=0)
            freeze_encoder(model, trained=("classifier",))
        model.encoder.checkpoint_blocks(case.modes)
        vocabulary = None
        if not is_mlm and not case.lora:
            vocabulary = CompactVocabulary(model.encoder, torch.arange(FINETUNED_ROWS))
            packs = [vocabulary.narrowed(batch) for batch in packs]
        strategy = Strategy(model, World())
        optimizer = AdamW(group_parameters(model, OptimConfig()), OptimConfig())

        def step(number: int) -> None:
            train_step(
                strategy,
                StepShare.of_all(packs),
                optimizer,
                compute=compute,
                scaler=None,
                step=number,
                seed=0,
                learning_rate=1e-4,
                max_grad_norm=1.0,
            )

        def evaluate() -> None:
            if is_mlm:
                score_masked_lm(model, packs[:1], compute, World())
                return
            whole = vocabulary.whole() if vocabulary is not None else nullcontext()
            with torch.no_grad(), whole, compute.autocast():
                model.logits_NC(packs[0].inputs, dropout_seed=None)

        phase("step", lambda: step(0))
        phase("evaluation", evaluate)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        saved: list[Any] = []

        def save() -> None:
            with vocabulary.whole() if vocabulary is not None else nullcontext():
                saved.append(Snapshot(model))
                saved[0].take(model, optimizer.named_moments())

        phase("save", save)
        phase("step after it", lambda: step(1))
        phase("evaluation after it", evaluate)
    return {
        "peaks_bytes": found.phase_peaks_bytes,
        "resident_bytes": resident - resident_before,
    }


def row_of(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Planned beside measured: the step alone, the evaluation, and the run that saves."""
    peaks = measured["peaks_bytes"]
    without = plan_memory(replace(case.shape, has_snapshot=False, threads=0))
    whole = plan_memory(replace(case.shape, threads=0))
    planned = without.phase_peaks_bytes
    step = max(planned["forward and backward"], planned["optimizer"])
    return {
        "name": case.name,
        "case": asdict(case),
        "step": [step, peaks["step"]],
        "evaluation": [planned["evaluation"], peaks["evaluation"]],
        "run": [whole.peak_bytes, max(peaks.values())],
        "resident_bytes": measured["resident_bytes"],
    }


def error_of(pair: list[int]) -> float:
    """Planned over measured, less 1."""
    return pair[0] / pair[1] - 1.0


def plot_of(rows: list[dict[str, Any]]) -> list[str]:
    """Each run's error of a step as a mark between the bounds, in text."""
    lines = [f"{'-3 %':>8}{'0':^11}{'+10 %':>11}"]
    for row in rows:
        place = round((error_of(row["step"]) + UNDER) / (WITHIN + UNDER) * 26)
        marks = ["."] * 27
        marks[round(UNDER / (WITHIN + UNDER) * 26)] = "|"
        marks[min(max(place, 0), 26)] = "o"
        lines.append(f"    {''.join(marks)}  {row['name']}")
    return lines


def write(rows: list[dict[str, Any]]) -> None:
    """The table, the plot, and the figures as JSON."""
    today = datetime.now(UTC).date().isoformat()
    base = HERE / "results" / f"memory_{os.cpu_count()}-core-cpu_{today}"
    kinds = ("step", "evaluation", "run")
    errors = {kind: [error_of(row[kind]) for row in rows] for kind in kinds}
    lines = [
        f"# Memory, planned and measured: {os.cpu_count()}-core CPU, {today}",
        "",
        "`python benchmarks/memory_grid.py --write`",
        "",
        f"{len(rows)} runs. Measured: bytes that torch's CPU allocator has given out, at their "
        "highest; error: planned over measured, less 1. Step: the first one, forward, backward and "
        "update. Evaluation: the pass after it. Run: all of it with the copy for checkpoints. "
        "Resident: what the process grew by from before the model until after the evaluation; it "
        "holds also what freed memory leaves behind, oneDNN's compiled products and the "
        "profiler's own records. bf16 is emulated on this machine and very slow, so only tiny "
        "shapes are measured in it. plain: without the C kernels. No figure is of a GPU.",
        "",
        "| | smallest error | largest error | mean of absolute |",
        "| --- | --- | --- | --- |",
        *(
            f"| {kind} | {min(found):+.1%} | {max(found):+.1%} | "
            f"{sum(map(abs, found)) / len(found):.1%} |"
            for kind, found in errors.items()
        ),
        "",
        "| run | step, MiB | planned | error | evaluation | run | resident, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['name']} | {row['step'][1] >> 20:,} | {row['step'][0] >> 20:,} | "
            f"{error_of(row['step']):+.1%} | {error_of(row['evaluation']):+.1%} | "
            f"{error_of(row['run']):+.1%} | {row['resident_bytes'] >> 20:,} |"
            for row in rows
        ),
        "",
        "Errors of the step between the bounds:",
        "",
        "```",
        *plot_of(rows),
        "```",
    ]
    base.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = {"bounds": {"within": WITHIN, "under": UNDER}, "rows": rows}
    base.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the grid, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--case", type=int)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    grid = cases()
    if asked.case is not None:
        print(json.dumps(measure(grid[asked.case])))
        return
    rows = []
    started = time.perf_counter()
    for number, case in enumerate(grid):
        if asked.only not in case.name:
            continue
        answer = subprocess.run(
            [sys.executable, __file__, "--case", str(number)],
            env={**os.environ, "BERTSMITH_KERNELS": "on" if case.body == "kernels" else "off"},
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            sys.exit(f"{case.name}: {answer.stderr[-2000:]}")
        rows.append(row_of(case, json.loads(answer.stdout.splitlines()[-1])))
        row = rows[-1]
        print(
            f"{row['name']:<62} step {error_of(row['step']):+7.1%} of {row['step'][1] >> 20:>5} MiB"
            f"  evaluation {error_of(row['evaluation']):+7.1%}  run {error_of(row['run']):+7.1%}"
            f"  resident {row['resident_bytes'] >> 20} MiB",
            flush=True,
        )
    print(f"{len(rows)} runs in {time.perf_counter() - started:.0f} s")
    if asked.write:
        write(rows)
    outside = [
        row["name"]
        for row in rows
        if any(
            not -UNDER <= error_of(row[kind]) <= WITHIN for kind in ("step", "evaluation", "run")
        )
    ]
    if outside:
        sys.exit("outside the bounds: " + "; ".join(outside))


if __name__ == "__main__":
    main()
