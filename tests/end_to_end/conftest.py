"""The whole path run once by the command line, on a small world with something to learn."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from small_world import sentences, write_model_config, write_table

Done = subprocess.CompletedProcess[str]


def run_bertsmith(*argv: str | Path, stdin: str | None = None) -> Done:
    """Run the installed command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "bertsmith", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        input=stdin,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
    )


def must(done: Done) -> None:
    """Stop the tests here if a step of the main path failed."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def bertsmith() -> Callable[..., Done]:
    """Runs a command line, `bertsmith("predict", "--model", ...)`; `stdin` by keyword."""
    return run_bertsmith


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text/, the tables and shape.json; nothing has run."""
    root = tmp_path_factory.mktemp("world")
    (root / "text").mkdir()
    for number in range(2):
        documents = [t for t, _ in sentences(1500, seed=10 + number)]
        (root / "text" / f"part-{number}.txt").write_text("\n\n".join(documents) + "\n")
    with (root / "new.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows([n, t] for n, (t, _) in enumerate(sentences(40, seed=4)))
    write_table(root / "train.csv", sentences(320, seed=1))
    write_table(root / "dev.csv", sentences(80, seed=2))
    write_table(root / "test.csv", sentences(200, seed=3))
    write_model_config(root / "shape.json")
    return root


@pytest.fixture(scope="session")
def prepared(world: Path) -> Path:
    """The world after `prepare` has written prepared/."""
    must(
        run_bertsmith(
            *("prepare", "--input", world / "text", "--output", world / "prepared"),
            *("--vocab_size", "300"),
        )
    )
    return world


@pytest.fixture(scope="session")
def pretrained(prepared: Path) -> Path:
    """The world after `pretrain` has written pretrained/."""
    must(
        run_bertsmith(
            *("pretrain", "--data", prepared / "prepared", "--model", prepared / "shape.json"),
            *("--output", prepared / "pretrained", "--steps", "300", "--tokens_per_step", "1024"),
            *("--packing.tokens_per_pack", "1024", "--packing.max_sequence_tokens", "64"),
            *("--optim.learning_rate", "5e-3"),
        )
    )
    return prepared


@pytest.fixture(scope="session")
def tuned(pretrained: Path) -> Path:
    """The world after `finetune` has written tuned/: everything a later verb needs."""
    must(
        run_bertsmith(
            *("finetune", "--model", pretrained / "pretrained" / "model"),
            *("--data", pretrained / "train.csv", "--eval", pretrained / "dev.csv"),
            *("--output", pretrained / "tuned", "--epochs", "8"),
            *("--optim.learning_rate", "2e-3"),
        )
    )
    return pretrained
