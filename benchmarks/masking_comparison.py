"""What ways of masking give: equal steps, several seeds, and a task after fine-tuning.

    python benchmarks/masking_comparison.py --text FILE --train TABLE --dev TABLE --work FOLDER \
        [--vocab_size 8192] [--epochs 7] [--seeds 3] [--only covering independent ...]

Every run is the command line's: `prepare` once, then `pretrain` and `finetune` a way and seed. A
run that FOLDER has already is not made again. Prints a Markdown table, means and standard
deviations over seeds, and writes comparison.json into FOLDER.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WAYS: dict[str, list[str]] = {
    "independent": ["--masking.schedule", "independent"],
    "covering": [],
    "covering, rare boost 0.25": ["--masking.rare_boost", "0.25"],
    "covering, rare boost 0.5": ["--masking.rare_boost", "0.5"],
    "covering, word": ["--masking.unit", "word"],
    "covering, span": ["--masking.unit", "span"],
    "covering, 30 %": ["--masking.share", "0.3"],
    "covering, 40 %": ["--masking.share", "0.4"],
}
BUCKETS = ("rare", "middle", "frequent")


def bertsmith(*arguments: object) -> None:
    """A command that has to succeed; what it says goes to standard error."""
    command = [sys.executable, "-m", "bertsmith", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Of a run that is complete."""
    file = folder / "summary.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("status") == "completed" else None


def run_way(
    options: list[str], seed: int, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one pretraining and its task."""
    pretrained, tuned = folder / "pretrained", folder / "tuned"
    if summary_of(pretrained) is None:
        bertsmith(
            *("pretrain", "--data", args.work / "data", "--model", args.model),
            *("--output", pretrained, "--overwrite", "true", "--epochs", args.epochs),
            *("--tokens_per_step", 1024, "--packing.tokens_per_pack", 1024),
            *("--packing.max_sequence_tokens", 256, "--optim.learning_rate", 2e-3),
            *("--eval.every_steps", 10**6, "--eval.max_tokens", 10**6),
            *("--save.every_steps", 10**6, "--seed", seed, *options),
        )
    if summary_of(tuned) is None:
        bertsmith(
            *("finetune", "--model", pretrained / "model", "--data", args.train),
            *("--eval", args.dev, "--output", tuned, "--overwrite", "true", "--epochs", 2),
            *("--optim.learning_rate", 5e-4, "--seed", seed),
        )
    of_text, of_task = summary_of(pretrained), summary_of(tuned)
    assert of_text is not None, "a run that failed has raised"
    assert of_task is not None, "as above"
    found = {
        "never predicted": of_text["coverage"]["never_predicted_share"],
        "loss": of_text["valid_loss"],
        "accuracy": of_text["valid_accuracy"],
        "task accuracy": of_task["metrics"]["accuracy"],
    }
    for name in BUCKETS:
        bucket = of_text["valid_by_frequency"][name]
        found[f"loss, {name}"] = bucket["loss"]
        found[f"accuracy, {name}"] = bucket["accuracy"]
    return found


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("text", "train", "dev", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    bertsmith(
        *("prepare", "--input", args.text, "--output", args.work / "data"),
        *("--vocab_size", args.vocab_size, "--valid_share", 0.1),
    )
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.only}
    for seed in range(args.seeds):
        for way in args.only:
            folder = args.work / way.replace(" ", "_").replace(",", "").replace("%", "percent")
            found[way].append(run_way(WAYS[way], seed, folder / str(seed), args))
            (args.work / "comparison.json").write_text(json.dumps(found, indent=1))
    names = list(found[args.only[0]][0])
    print("| masking | " + " | ".join(names) + " |")
    print("| --- |" + " --- |" * len(names))
    for way, runs in found.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.4f} ± {spread:.4f}")
        print(f"| {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
