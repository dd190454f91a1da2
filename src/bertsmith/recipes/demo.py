"""`bertsmith demo`: the whole path on the docstrings of the installed packages, and its worth.

Nothing is downloaded. A small BERT is pretrained on docstrings and fine-tuned to say which package
a paragraph comes from, with few labelled examples; the same fine-tuning starts from random weights.
Modules of the test are seen by neither, and the packages' names are hidden in labelled texts.
"""

import csv
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as Grid

from bertsmith.batch import pack
from bertsmith.data.config import PackingConfig
from bertsmith.data.docstring_task import (
    DocstringTask,
    Example,
    TaskSizes,
    draw_train,
    make_task,
)
from bertsmith.data.docstrings import harvest
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.hf import load_masked_lm, read_config, save_model
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.recipes.config import (
    DemoConfig,
    EvaluateConfig,
    FinetuneConfig,
    PrepareConfig,
    PretrainConfig,
)
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.prepare import prepare
from bertsmith.recipes.pretrain import pretrain
from bertsmith.report.console import table_console
from bertsmith.report.progress import Speaker
from bertsmith.report.run_folder import (
    open_run_folder,
    versions,
    write_config,
    write_summary,
    write_text,
)
from bertsmith.train.config import OptimConfig

MODEL = "bert-mini"
PRETRAIN_SHARE = 0.6
"""Of the minutes; the rest is for reading, fine-tuning and testing."""

MAX_SEQUENCE_TOKENS = 128
FINETUNE_EPOCHS = 15
NUM_BLANKS = 5
SIZES = (TaskSizes(), TaskSizes(num_labels=6, train=20, dev=15, test=40))
"""Of the task; the second is for an environment with few packages."""


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A word hidden in a text nobody was trained on, and what the model thinks stood there."""

    text: str
    word: str
    guesses: list[str]
    """The five likeliest, best first."""


@dataclass(frozen=True, kw_only=True)
class DemoSummary:
    """What the demo found; `summary.json` holds the same."""

    status: str
    labels: tuple[str, ...]
    train_examples: int
    test_examples: int
    pretrain_tokens: int
    pretrain_tokens_per_second: float | None
    valid_loss: float | None
    accuracy_pretrained: list[float]
    """On the test paragraphs, one a seed."""

    accuracy_random: list[float]
    blanks: list[Blank]
    seconds: float
    versions: dict[str, str]


def main(config: DemoConfig) -> int:
    """Run the demo and print its table."""
    summary = demo(config)
    if summary is None:
        return EXIT_INTERRUPTED
    print_summary(summary, table_console())
    print(f"\nall of it lies in {config.output}: models, logs, tables, summary.json")
    return 0


def demo(config: DemoConfig) -> DemoSummary | None:
    """Run the whole path; None if it was interrupted.

    Raises:
        UserError: The output cannot be written, or too few packages are installed.
    """
    started_at = time.monotonic()
    if config.minutes <= 0 or config.seeds < 1:
        raise UserError("--minutes must be over 0 and --seeds at least 1")
    folder = open_run_folder(config.output, resume=None, overwrite=config.overwrite)
    write_config(folder, config)
    speaker = Speaker(folder)
    task, sizes = gather(folder, speaker)
    speaker.say("1 of 4: prepare - a tokenizer and token shards")
    prepare(
        PrepareConfig(input=[str(folder / "docstrings.jsonl")], output=str(folder / "prepared")),
        speaker=speaker,
    )
    minutes = config.minutes * PRETRAIN_SHARE
    speaker.say(f"2 of 4: pretrain - {MODEL} for {minutes:.1f} minutes")
    pretrained = pretrain(
        PretrainConfig(
            data=str(folder / "prepared"),
            model=MODEL,
            output=str(folder / "pretrained"),
            minutes=minutes,
            tokens_per_step=4096,
            packing=PackingConfig(tokens_per_pack=4096, max_sequence_tokens=MAX_SEQUENCE_TOKENS),
            optim=OptimConfig(learning_rate=1e-3, warmup_share=0.1),
        )
    )
    if pretrained.status == "interrupted":
        return None
    accuracies: dict[str, list[float]] = {"pretrained": [], "random": []}
    for seed in range(config.seeds):
        write_table(folder / f"train-{seed}.csv", draw_train(task, sizes, seed=seed))
        write_random_model(folder, seed=seed)
        starts = {
            "pretrained": folder / "pretrained" / "model",
            "random": folder / f"random-{seed}",
        }
        for name, start in starts.items():
            speaker.say(f"3 of 4: finetune - seed {seed + 1} of {config.seeds}, {name} weights")
            accuracy = finetune_and_test(folder, start, name=name, seed=seed)
            if accuracy is None:
                return None
            accuracies[name].append(accuracy)
    speaker.say("4 of 4: fill in blanks of texts that were held out")
    summary = DemoSummary(
        status="completed",
        labels=task.labels,
        train_examples=len(task.labels) * sizes.train,
        test_examples=len(task.test),
        pretrain_tokens=pretrained.real_tokens,
        pretrain_tokens_per_second=pretrained.real_tokens_per_second,
        valid_loss=pretrained.valid_loss,
        accuracy_pretrained=accuracies["pretrained"],
        accuracy_random=accuracies["random"],
        blanks=fill_blanks(folder / "pretrained" / "model", task.held_out_texts),
        seconds=round(time.monotonic() - started_at, 1),
        versions=versions(),
    )
    write_summary(folder, asdict(summary))
    write_report(folder, summary)
    return summary


def gather(folder: Path, speaker: Speaker) -> tuple[DocstringTask, TaskSizes]:
    """Harvest the docstrings and write what the verbs read.

    Raises:
        UserError: Too few packages with docstrings are installed.
    """
    speaker.say("reading the docstrings of the installed packages (nothing is imported)")

    def on_package(done: int, total: int, name: str) -> None:
        if done == total or done % 40 == 0:
            speaker.say(f"  {done} of {total} packages, {name}")

    docstrings = harvest(on_package=on_package)
    for sizes in SIZES:
        try:
            task = make_task(docstrings, sizes)
            break
        except ValueError as error:
            problem = error
    else:
        raise UserError(f"the demo has too little text: {problem}; install more packages")
    lines = (json_line(text) for text in task.texts)
    write_text(folder / "docstrings.jsonl", "".join(lines))
    write_table(folder / "dev.csv", task.dev)
    write_table(folder / "test.csv", task.test)
    num_bytes = sum(len(t.encode()) for t in task.texts)
    speaker.say(
        f"{len(task.texts):,} docstrings ({num_bytes / 1e6:.1f} MB) to pretrain on; "
        f"{len(task.labels)} packages to tell apart by {sizes.train} labelled paragraphs each: "
        f"{', '.join(task.labels)}"
    )
    return task, sizes


def json_line(text: str) -> str:
    """A docstring as a line of JSONL."""
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def write_table(path: Path, examples: Sequence[Example]) -> None:
    """A CSV with the columns text and label."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([e.text, e.label] for e in examples)


def write_random_model(folder: Path, *, seed: int) -> None:
    """The pretrained model's shape and tokenizer with random weights."""
    source = folder / "pretrained" / "model"
    shape = read_config(source)
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=1000 + seed)
    save_model(folder / f"random-{seed}", model, tokenizer_folder=source)


def finetune_and_test(folder: Path, start: Path, *, name: str, seed: int) -> float | None:
    """Accuracy on the test paragraphs after fine-tuning; None if interrupted."""
    output = folder / f"task-{name}-{seed}"
    tuned = finetune(
        FinetuneConfig(
            model=str(start),
            data=str(folder / f"train-{seed}.csv"),
            eval=str(folder / "dev.csv"),
            output=str(output),
            epochs=FINETUNE_EPOCHS,
            patience=None,
            max_sequence_tokens=MAX_SEQUENCE_TOKENS,
            examples_per_step=16,
            eval_every_steps=20,
            optim=OptimConfig(learning_rate=5e-4, warmup_share=0.1, beta2=0.999, eps=1e-8),
            seed=seed,
        )
    )
    if tuned.status == "interrupted":
        return None
    found = evaluate(EvaluateConfig(model=str(output), data=str(folder / "test.csv")))
    return found.metrics.by_name()["accuracy"]


@torch.inference_mode()
def fill_blanks(model_folder: Path, texts: Sequence[str]) -> list[Blank]:
    """Hide a word in each of a few texts and ask the model for it.

    Of every so many-th text, so that many modules have a chance, those whose first line has 8 to
    24 words are taken, the first ones in order; the word is the longest of its middle third that
    is one token. Nothing is chosen by how well it goes.
    """
    model, _ = load_masked_lm(model_folder, seed=0)
    tokenizer = load_tokenizer(model_folder)
    vocabulary = tokenizer.tokenizer.get_vocab()
    blanks: list[Blank] = []
    for text in texts[:: max(len(texts) // 200, 1)]:
        words = text.splitlines()[0].split()
        if not 8 <= len(words) <= 24:
            continue
        third = len(words) // 3
        places = [i for i in range(third, 2 * third + 1) if words[i].lower() in vocabulary]
        if not places:
            continue
        place = max(places, key=lambda i: len(words[i]))
        shown = [*words[:place], tokenizer.roles["mask_token"], *words[place + 1 :]]
        ids = torch.tensor(tokenizer.tokenizer.encode(" ".join(shown)).ids)
        mask = (ids == tokenizer.vocab.mask_id).nonzero()[:, 0]
        if len(mask) != 1 or len(ids) > MAX_SEQUENCE_TOKENS:
            continue
        scores_MV = model.logits_MV(pack([ids]), mask, dropout_seed=None)
        best = scores_MV[0].topk(5).indices.tolist()
        blanks.append(
            Blank(
                text=" ".join(shown),
                word=words[place],
                guesses=[str(tokenizer.tokenizer.id_to_token(i)) for i in best],
            )
        )
        if len(blanks) == NUM_BLANKS:
            break
    return blanks


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; a single value has no spread."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.1%} (one seed)"
    return f"{mean:.1%} +- {statistics.stdev(values):.1%}"


def print_summary(summary: DemoSummary, console: Console) -> None:
    """The table and the blanks."""
    grid = Grid(
        title=f"which of {len(summary.labels)} packages a paragraph comes from: test accuracy "
        f"({summary.test_examples:,} paragraphs of modules that no one was trained on)"
    )
    grid.add_column("start from")
    for seed in range(len(summary.accuracy_pretrained)):
        grid.add_column(f"seed {seed}", justify="right")
    grid.add_column("mean +- std", justify="right")
    for name, values in (
        ("pretrained weights", summary.accuracy_pretrained),
        ("random weights", summary.accuracy_random),
    ):
        grid.add_row(name, *(f"{v:.1%}" for v in values), spread(values))
    console.print(grid)
    console.print(
        f"guessing gives {1 / len(summary.labels):.1%}; {summary.train_examples:,} labelled "
        f"examples a run; pretrained on {summary.pretrain_tokens:,} tokens at "
        f"{summary.pretrain_tokens_per_second or 0:,.0f} tokens/s"
    )
    console.print("\nfilling in blanks of held-out docstrings:")
    for blank in summary.blanks:
        console.print(f"  {blank.text}", markup=False)
        console.print(f"    was: {blank.word}; guesses: {', '.join(blank.guesses)}", markup=False)


def write_report(folder: Path, summary: DemoSummary) -> None:
    """README.md: the same for later."""
    seeds = range(len(summary.accuracy_pretrained))
    lines = [
        "# bertsmith demo",
        "",
        f"Which of {len(summary.labels)} packages does a paragraph come from? Test accuracy on "
        f"{summary.test_examples:,} paragraphs of modules that nobody was trained on; guessing "
        f"gives {1 / len(summary.labels):.1%}.",
        "",
        "| start from | " + " | ".join(f"seed {s}" for s in seeds) + " | mean +- std |",
        "| --- |" + " --- |" * (len(seeds) + 1),
    ]
    for name, values in (
        ("pretrained weights", summary.accuracy_pretrained),
        ("random weights", summary.accuracy_random),
    ):
        cells = " | ".join(f"{v:.1%}" for v in values)
        lines.append(f"| {name} | {cells} | {spread(values)} |")
    lines += ["", "Packages: " + ", ".join(summary.labels), "", "## Blanks", ""]
    for blank in summary.blanks:
        lines.append(f"- {blank.text} (was `{blank.word}`; guesses: {', '.join(blank.guesses)})")
    write_text(folder / "README.md", "\n".join([*lines, ""]))
