"""Scores of fine-tuned weights on public sets, beside a Hugging Face Trainer's, over seeds.

    python benchmarks/published.py --model FOLDER --tasks FOLDER --peer hf_finetune.py \
        --work FOLDER [--only rte mrpc ...] [--seeds 5] [--threads 1] [--together 2] [--alone]

Both sides train the same weights with the same settings (bf16, batches of 32, a learning rate that
rises for WARMUP_STEPS and falls to 0, weight decay 0.01, 128 tokens) and are judged once, at the
end. Sets, sides and seeds take turns. As many runs as --together says go on at once, each with its
--threads: with 2, a run of ours mostly has the peer's beside it, so both have the same machine. A
run that FOLDER has already is not made again. Sets that the peer's script does not know (labels by
the list, a tag a word) are run by us alone, and with --alone all are. At the end a Markdown table
is printed of all that FOLDER has of the sets, and written into it as published.json; after a run
that was stopped, --seeds 0 does that alone.

FOLDER of the tasks holds one folder a set, as `train.*` and `dev.*` (or `test.*`).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH, LONGEST, WARMUP_STEPS = "32", "128", "20"


@dataclass(frozen=True, kw_only=True)
class Set:
    """A public set and how it is judged."""

    train: str
    dev: str
    metric: str
    """Of ours."""

    peer_metric: str | None
    """Of the peer's script; None: it has no such task."""

    rate: str
    """The learning rate: 3e-4 where there are many labels, as a small model needs it."""

    epochs: str = "3"
    tuned_on: str | None = None
    """Where each label's threshold is found before `dev` is judged; None: it is a half."""

    is_regression: bool = False
    published: str = ""
    """What is known of like weights."""


SETS = {
    "rte": Set(
        rate="1e-4",
        train="train.jsonl",
        dev="dev.jsonl",
        metric="accuracy",
        peer_metric="accuracy",
        published="68.8 (MiniLM-L6)",
    ),
    "mrpc": Set(
        rate="1e-4",
        train="train.tsv",
        dev="dev.tsv",
        metric="accuracy",
        peer_metric="accuracy",
        published="84.1 (bert-base-cased)",
    ),
    "stsb": Set(
        rate="5e-5",
        train="train.tsv",
        dev="dev.tsv",
        metric="spearman",
        peer_metric="spearman",
        is_regression=True,
        published="86.9 (DistilBERT)",
    ),
    "banking77": Set(
        rate="3e-4",
        train="train.csv",
        dev="test.csv",
        metric="accuracy",
        peer_metric="accuracy",
        published="93.1 (BERT-base, batch 16)",
    ),
    "clinc150": Set(
        rate="3e-4", train="train.csv", dev="test.csv", metric="accuracy", peer_metric="accuracy"
    ),
    "sst2": Set(
        rate="1e-4",
        train="train.tsv.gz",
        dev="dev.tsv",
        metric="accuracy",
        peer_metric="accuracy",
        epochs="1",
        published="91.5 (MiniLM-L6, more epochs)",
    ),
    "wnut17": Set(
        rate="2e-4",
        train="train.conll",
        dev="test.conll",
        metric="span_f1",
        peer_metric=None,
        epochs="5",
        published="40 to 48 (BERT-base)",
    ),
    "ud_en_ewt_pos": Set(
        rate="2e-4",
        train="train.conll.gz",
        dev="test.conll",
        metric="accuracy",
        peer_metric=None,
        epochs="2",
    ),
    "goemotions": Set(
        rate="5e-5",
        train="train.csv.gz",
        dev="test.csv",
        tuned_on="dev.csv",
        metric="macro_f1",
        peer_metric=None,
        epochs="4",
        published="50.3 (BERT-base, 10 epochs)",
    ),
}


def ours(task: Set, folder: Path, run: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Score and texts a second of `bertsmith finetune`."""
    command = [
        *(sys.executable, "-m", "bertsmith", "finetune", "--model", args.model),
        *("--data", folder / task.train, "--eval", folder / (task.tuned_on or task.dev)),
        *("--output", run, *(["--decide.thresholds", "tuned"] if task.tuned_on else [])),
        *("--overwrite", "true", "--epochs", task.epochs, "--examples_per_step", BATCH),
        *("--max_sequence_tokens", LONGEST, "--optim.learning_rate", task.rate),
        *("--optim.warmup_steps", WARMUP_STEPS, "--optim.schedule", "linear"),
        *("--precision", "bf16"),
        *("--optim.weight_decay", "0.01", "--eval_every_steps", 10**6, "--seed", seed),
    ]
    words = [str(word) for word in command]
    environ = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    with (run.parent / "log.txt").open("w") as log:
        subprocess.run(words, check=True, stdout=log, stderr=log, env=environ)
    summary = json.loads((run / "summary.json").read_text())
    tokens_a_text = summary["real_tokens"] / (summary["train_examples"] * summary["epochs"])
    metrics = summary["metrics"]
    if task.tuned_on:
        judge = [*command[:3], "evaluate", "--model", run, "--data", folder / task.dev, "--json"]
        done = subprocess.run(
            [str(word) for word in judge],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        metrics = json.loads(done.stdout)["metrics"]
    return {
        "score": metrics[task.metric],
        "texts_per_second": summary["real_tokens_per_second"] / tokens_a_text,
    }


def peers(
    task: Set, folder: Path, run: Path, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The same of the Trainer, sorted by length."""
    command = [
        *(sys.executable, args.peer, "--model", args.model, "--train", folder / task.train),
        *(
            "--eval",
            folder / task.dev,
            "--epochs",
            task.epochs,
            "--batch",
            BATCH,
            "--lr",
            task.rate,
        ),
        *("--max-length", LONGEST, "--mode", "group_by_length", "--seed", seed),
        *("--lr-warmup", WARMUP_STEPS),
        *("--threads", args.threads, *(["--regression"] if task.is_regression else [])),
    ]
    done = subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"score": found[task.peer_metric], "texts_per_second": found["samples_per_s"]}


Results = dict[str, dict[str, list[dict[str, Any]]]]
"""Of each set and side, what its runs gave."""

SIDES = {"bertsmith": ours, "Trainer": peers}


def sides_of(task: Set, *, alone: bool) -> list[str]:
    """Who does a set."""
    return ["bertsmith"] if alone or task.peer_metric is None else list(SIDES)


def run_missing(name: str, side: str, seed: int, args: argparse.Namespace) -> None:
    """Make one run, unless its result is there."""
    run = args.work / name / f"{side}-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    result = run / "result.json"
    if not result.exists():
        answer = SIDES[side](SETS[name], args.tasks / name, run / "run", seed, args)
        result.write_text(json.dumps(answer))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "tasks", "peer", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--together", type=int, default=os.cpu_count())
    parser.add_argument("--alone", action="store_true", help="without the peer")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.together) as pool:
        runs = [
            pool.submit(run_missing, name, side, seed, args)
            for seed, name in itertools.product(range(args.seeds), args.only)
            for side in sides_of(SETS[name], alone=args.alone)
        ]
    for run in runs:
        run.result()
    found: Results = {name: {} for name in args.only}
    for name in args.only:
        for side in SIDES:
            done = sorted((args.work / name).glob(f"{side}-*/result.json"))
            if done:
                found[name][side] = [json.loads(result.read_text()) for result in done]
    (args.work / "published.json").write_text(json.dumps(found, indent=1))
    print_table(found)


def print_table(found: Results) -> None:
    """Means, spreads and speeds."""
    print("| set | metric | seeds | bertsmith | Trainer | error | texts/s | ratio | published |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, sides in found.items():
        rates = {s: statistics.median(r["texts_per_second"] for r in sides[s]) for s in sides}
        scores = {side: [100 * run["score"] for run in runs] for side, runs in sides.items()}
        spread = {s: statistics.stdev(v) if len(v) > 1 else 0.0 for s, v in scores.items()}
        means = {s: f"{statistics.mean(v):.2f} ± {spread[s]:.2f}" for s, v in scores.items()}
        error, speed, ratio = "", f"{rates['bertsmith']:.0f}", ""
        if "Trainer" in sides:
            error = f"{spread['Trainer'] / len(scores['Trainer']) ** 0.5:.2f}"
            speed += f" against {rates['Trainer']:.0f}"
            ratio = f"{rates['bertsmith'] / rates['Trainer']:.2f}x"
        print(
            f"| {name} | {SETS[name].metric} | {len(scores['bertsmith'])} | {means['bertsmith']} | "
            f"{means.get('Trainer', '')} | {error} | {speed} | {ratio} | {SETS[name].published} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
