"""Data-parallel scale, on paper and by simulation: what 8 to 4,096 ranks would wait for.

    python benchmarks/scaling.py [--part imbalance start communication processes] [--text FILES]

- imbalance: the real stream's steps, one pack a rank; how long ranks wait for the busiest.
- start: how long rank 4,000 of 4,096 needs to build its part of step 1,000,000 of 10^12 tokens.
- communication: a model of summing gradients against computing (`communication.py`).
- processes: two processes of one thread against one process of two threads, on this machine.

Results go into `benchmarks/results/`; without `--text` the docstrings of the installed packages are
the text. `docs/scaling.md` says what the figures mean.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.data import blocks
from bertsmith.data.block_counts import BlockCount, remember_counts
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.packing import longest_first
from bertsmith.data.shards import TokenCorpus, open_shards
from bertsmith.data.stream import PretrainStream
from bertsmith.model.config import PRESETS
from bertsmith.model.flops import training_flop
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare
from communication import HARDWARE, TOKENS, model_rows
from interleave import HERE
from made_up_corpus import MadeUpCorpus, write_hollow_shards
from run_all import docstring_paragraphs, installed_minilm, machine

RANKS = (8, 64, 1024, 4096)
PACKING = PackingConfig()
SHAPE = PRESETS["bert-base"]
FULL_STEPS = 10
"""Fewest steps to judge a number of ranks by."""

TOKENS_A_SECOND = 312_000
"""Of one H100 on an encoder of BERT-base's size: the best published (arXiv 2412.13663, table 3)."""


def work_of(lengths: list[int], num_read: int) -> float:
    """FLOP of a forward and backward pass over a pack."""
    return training_flop(SHAPE, lengths, num_read=num_read, scores_vocabulary=True)


def idle(work_NR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each step (row), the share of time that ranks (columns) wait for the slowest."""
    share_N: NDArray[np.float64] = 1.0 - work_NR.mean(axis=1) / work_NR.max(axis=1)
    return share_N


def measure_imbalance(corpus: TokenCorpus) -> list[dict[str, Any]]:
    """Idle time of the real stream, for each number of ranks, as one block and as eight."""
    rows = []
    usual = blocks.ONE_BLOCK_TOKENS, blocks.BLOCK_TOKENS
    for num_blocks in (1, 8):
        block_tokens = -(-corpus.num_tokens // num_blocks)
        blocks.ONE_BLOCK_TOKENS = blocks.BLOCK_TOKENS = block_tokens
        try:
            rows += [{"blocks": num_blocks} | row for row in _imbalance_of(corpus)]
        finally:
            blocks.ONE_BLOCK_TOKENS, blocks.BLOCK_TOKENS = usual
    return rows


def _imbalance_of(corpus: TokenCorpus) -> list[dict[str, Any]]:
    """Packs of whole epochs in the stream's order, dealt one a rank."""
    stream = PretrainStream(
        corpus,
        packing=PACKING,
        masking=MaskingConfig(),
        tokens_per_step=64 * PACKING.tokens_per_pack,
        seed=0,
    )
    per_epoch = stream.steps_in_epoch(0)
    packs: list[tuple[int, float]] = []  # tokens, work
    lengths: list[int] = []
    rows = []
    step = 0
    for num_ranks in RANKS:
        while len(packs) < FULL_STEPS * num_ranks or step % per_epoch:
            for pack in stream.step(step):
                sequences = pack.inputs.starts_N1.diff().tolist()
                packs.append((pack.num_tokens, work_of(sequences, pack.num_targets)))
                if step < per_epoch:
                    lengths += sequences
            step += 1
        num_steps = len(packs) // num_ranks
        packs_an_epoch = len(packs) * per_epoch // step
        tokens_NR, work_NR = (
            np.array(values[: num_steps * num_ranks], np.float64).reshape(num_steps, num_ranks)
            for values in zip(*packs, strict=True)
        )
        rows_a_rank = round(len(lengths) / packs_an_epoch)
        rows.append(
            {
                "ranks": num_ranks,
                "steps": num_steps,
                "epochs": step // per_epoch,
                "packs_an_epoch": packs_an_epoch,
                "idle_by_work": float(idle(work_NR).mean()),
                "worst_step": float(idle(work_NR).max()),
                "idle_by_tokens": float(idle(tokens_NR).mean()),
                "rows_a_rank": rows_a_rank,
                "idle_of_equal_rows": _idle_of_equal_rows(lengths, num_ranks, rows_a_rank),
                "packing_efficiency": stream.efficiency,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _idle_of_equal_rows(lengths: list[int], num_ranks: int, rows: int) -> float:
    """For comparison: each rank the same number of sequences, drawn at random, not padded."""
    rng = np.random.default_rng(0)
    work_of_row = np.array([work_of([n], round(0.15 * (n - 2))) for n in range(513)])[lengths]
    drawn_NR = rng.choice(work_of_row, (FULL_STEPS, num_ranks, rows)).sum(axis=2)
    return float(idle(drawn_NR).mean())


def measure_start(folder: Path) -> dict[str, Any]:
    """Time from an open index of 10^12 tokens to the packs of a rank far out."""
    num_blocks = -(-(10**12) // blocks.BLOCK_TOKENS)
    corpus = MadeUpCorpus(num_blocks=num_blocks, folder=folder)
    cut = blocks.cut_blocks(corpus)
    planning = _seconds(lambda: blocks.plan_block(corpus, cut, 0, PACKING))
    plan = blocks.plan_block(corpus, cut, 0, PACKING)
    lengths_S = plan.pieces.lengths_S
    dealing = _seconds(lambda: longest_first(lengths_S, np.random.default_rng(0)))
    # All blocks of this corpus have the same lengths, each in another order.
    count = BlockCount(plan.shapes.num_packs, int(lengths_S.sum(dtype=np.int64)))
    remember_counts(corpus, cut, PACKING, [count] * num_blocks)

    def start() -> tuple[int, int]:
        fresh = MadeUpCorpus(num_blocks=num_blocks, folder=folder)
        stream = PretrainStream(
            fresh,
            packing=PACKING,
            masking=MaskingConfig(),
            tokens_per_step=4096 * PACKING.tokens_per_pack,
            seed=0,
        )
        share = stream.share(1_000_000, rank=4000, num_ranks=4096)
        assert list(share.numbers) == [4000]
        return fresh.lengths_asked, stream.epoch_of(1_000_000)[0]

    asked, epoch = start()
    hollow = folder / "hollow"
    num_shards = write_hollow_shards(hollow, installed_minilm(), num_tokens=corpus.num_tokens)
    result = {
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "blocks": num_blocks,
        "packs_a_block": count.packs,
        "epoch_of_step_1e6": epoch,
        "start_seconds": _seconds(start),
        "shards": num_shards,
        "open_seconds": _seconds(lambda: open_shards(hollow, "train", verify=False)),
        "lengths_read": asked,
        "plan_seconds_a_block": planning,
        "deal_seconds_a_block": dealing,
        "count_all_minutes_once": planning * num_blocks / 60,
        "planning_share_of_a_core": {
            str(n): (planning + dealing)
            * (n * TOKENS_A_SECOND / blocks.BLOCK_TOKENS)
            / blocks.BLOCKS_ABREAST
            for n in RANKS
        },
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(result, file=sys.stderr, flush=True)
    return result


def _seconds(call: Callable[[], object], *, times: int = 5) -> float:
    """Median of some calls."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measure_processes(data: Path, scratch: Path, *, steps: int = 20) -> dict[str, Any] | None:
    """Tokens a second of two processes of a thread each over those of one of two threads.

    Both sides train the same steps on the same prepared data, in turns; the figure is the median
    of three. None if this bertsmith cannot start several processes.
    """
    command = [sys.executable, "-m", "bertsmith", "pretrain"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    if "--parallel.devices" not in told:
        print("processes: skipped, pretrain knows no --parallel.devices", file=sys.stderr)
        return None
    command += ["--data", str(data), "--model", "bert-mini", "--steps", str(steps)]
    command += ["--tokens_per_step", "8192"]
    command += ["--eval.every_steps", str(steps), "--eval.max_tokens", "2000"]
    sides = {"one process, two threads": (2, []), "two processes, one thread each": (1, ["2"])}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(3):
        for name, (threads, devices) in sides.items():
            output = scratch / f"{turn}-{threads}"
            arguments = [*command, "--output", str(output)]
            for number in devices:
                arguments += ["--parallel.devices", number]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            subprocess.run(arguments, env=environment, check=True)
            summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
            rates[name].append(summary["real_tokens_per_second"])
    one, two = (statistics.median(values) for values in rates.values())
    return {"real_tokens_per_second": rates, "ratio": two / one, "command": command[1:]}


def prepared(texts: list[Path], folder: Path) -> Path:
    """The text as shards, by the tokenizer of the dev set-up."""
    if not texts:
        embedded = folder / "docstrings.txt"
        embedded.write_text("\n\n".join(docstring_paragraphs()), encoding="utf-8")
        texts = [embedded]
    config = PrepareConfig(
        input=[str(path) for path in texts],
        output=str(folder / "prepared"),
        tokenizer=str(installed_minilm()),
    )
    prepare(config)
    return folder / "prepared"


def said_text(texts: list[Path]) -> str:
    """Names of the files."""
    names = [path.name for path in texts]
    if len(names) > 2:
        return f"{len(names)} files, {names[0]} to {names[-1]}"
    return ", ".join(names) or "docstrings"


def markdown(content: dict[str, Any]) -> str:
    """The tables."""
    facts, parts = content["machine"], content["parts"]
    lines = [f"# Scale: {facts['cores']}-core {facts['cpu']}, {content['date']}", ""]
    lines += [f"torch {facts['torch']}, Python {facts['python']}.", ""]
    for part in parts.values():
        lines.append(f"`{part['command']}`  ")
    for name, part in parts.items():
        if name.startswith("imbalance"):
            lines += _imbalance_lines(part)
    if "start" in parts:
        lines += _start_lines(parts["start"]["result"])
    if "processes" in parts:
        result = parts["processes"]["result"]
        lines += ["", "## Processes (measured, in turns, three times)", ""]
        for name, rates in result["real_tokens_per_second"].items():
            lines.append(f"- {name}: {', '.join(f'{rate:,.0f}' for rate in rates)} tokens/s")
        lines.append(f"- ratio of the medians {result['ratio']:.1%}, target 95 %")
    if "communication" in parts:
        lines += _communication_lines(parts["communication"]["result"])
    return "\n".join([*lines, ""])


def _imbalance_lines(part: dict[str, Any]) -> list[str]:
    rows = part["result"]
    lines = [
        "",
        f"## Imbalance on {part['text']} (simulated ranks, real text, real stream)",
        "",
        f"{part['documents']:,} documents, {part['tokens']:,} tokens; "
        f"{rows[0]['packs_an_epoch']:,} packs of {PACKING.tokens_per_pack:,} an epoch, "
        f"{rows[0]['packing_efficiency']:.1%} full. One pack a rank, one step after another over "
        "the epochs told (the last packs of an epoch and the first of the next share a step). "
        "Idle: share of rank time spent waiting for the rank with most work, by the FLOP of "
        "BERT-base on the real lengths; target under 1 %. Equal rows: for comparison, ranks that "
        "each get as many random sequences, unpadded.",
        "",
        "| blocks | ranks | steps | epochs | idle | worst step | idle by tokens | equal rows |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['blocks']} | {r['ranks']:,} | {r['steps']:,} | {r['epochs']} | "
        f"**{r['idle_by_work']:.2%}** | {r['worst_step']:.2%} | {r['idle_by_tokens']:.2%} | "
        f"{r['idle_of_equal_rows']:.1%} |"
        for r in rows
    ]
    return lines


def _start_lines(result: dict[str, Any]) -> list[str]:
    shares = result["planning_share_of_a_core"]
    return [
        "",
        "## Start (measured, made-up index)",
        "",
        f"{result['documents']:,} documents, {result['tokens']:,} tokens in {result['blocks']:,} "
        f"blocks of {result['packs_a_block']:,} packs.",
        "",
        f"- step 1,000,000 (epoch {result['epoch_of_step_1e6']}) of rank 4,000 of 4,096, from the "
        f"noted counts to the built pack: **{result['start_seconds']:.2f} s**, target 2 s; "
        f"{result['lengths_read']:,} of the lengths were read",
        f"- before that, opening a folder of {result['shards']:,} shards (hollow files, their "
        f"hashes not compared): {result['open_seconds']:.2f} s",
        f"- planning a block {result['plan_seconds_a_block']:.2f} s, dealing it for an epoch "
        f"{result['deal_seconds_a_block']:.2f} s; peak memory {result['peak_rss_gib']:.1f} GiB",
        "- counting all blocks, once for a packing: "
        f"{result['count_all_minutes_once']:.0f} minutes of one core",
        f"- planning, as a share of a core on each rank, if every device read {TOKENS_A_SECOND:,} "
        "tokens/s: " + ", ".join(f"{int(n):,} ranks {share:.0%}" for n, share in shares.items()),
    ]


def _communication_lines(rows: list[dict[str, Any]]) -> list[str]:
    rates = ", ".join(f"{h.name} {h.tflop_per_second:g}" for h in HARDWARE[:2])
    heads = " | ".join(f"{n:,}" for n in TOKENS)
    lines = [
        "",
        "## Communication (model, not measured)",
        "",
        "`benchmarks/communication.py` has the formulas and every figure it goes by. Devices "
        f"compute at the best published rate (TFLOP/s: {rates}): a slower one hides more. Columns: "
        "tokens a device and step; cells: share of a step that computes.",
        "",
        f"| hardware | model | gradients | MB | sum, ms | {heads} |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(TOKENS),
    ]
    for row in rows:
        cells = " | ".join(f"{row[str(n)]:.1%}" for n in TOKENS)
        lines.append(
            f"| {row['hardware']} | {row['model']} | {row['gradients']} | {row['megabytes']:,} | "
            f"{row['sum_milliseconds']:,.1f} | {cells} |"
        )
    return lines


def save(output: Path, name: str, part: dict[str, Any]) -> None:
    """Add a part to today's results; other parts of the day stay."""
    output.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d")
    path = output / f"scaling_{os.cpu_count()}-core-cpu_{date}.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    content = {"date": date, "machine": machine(), "parts": parts | {name: part}}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(content), encoding="utf-8")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["imbalance", "start", "communication", "processes"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="as `prepare --input`")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    names = ["--text", *(path.name for path in args.text)] if args.text else []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = prepared(args.text, folder) if {"imbalance", "processes"} & set(args.part) else None
        for name in args.part:
            print(name, file=sys.stderr, flush=True)
            words = ["python", "benchmarks/scaling.py", "--part", name]
            part: dict[str, Any] = {"command": shlex.join(words)}
            result: Any
            if name == "imbalance":
                assert data is not None
                part["command"] = shlex.join(words + names)
                corpus = open_shards(data, "train")
                part["text"] = said_text(args.text)
                part |= {"documents": corpus.num_documents, "tokens": corpus.num_tokens}
                result = measure_imbalance(corpus)
            elif name == "start":
                result = measure_start(folder)
            elif name == "communication":
                result = model_rows()
            else:
                assert data is not None
                part["command"] = shlex.join(words + names)
                result = measure_processes(data, folder)
            if result is not None:
                key = f"{name} on {part['text']}" if name == "imbalance" else name
                save(args.output, key, part | {"result": result})


if __name__ == "__main__":
    main()
