"""The command line: help at once, mistakes in one line, values from file and options."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith import cli
from bertsmith.errors import EXIT_USER_ERROR, UserError
from bertsmith.recipes.config import FinetuneConfig, PrepareConfig, PretrainConfig

NEEDED = ["--data", "d", "--model", "bert-tiny", "--output", "o"]


def parsed(verb: str, *argv: str) -> object:
    """The config a command line gives."""
    return cli._parse(verb, list(argv))


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a refused command line prints, after checking that it is one line and code 2."""
    assert cli.run(list(argv)) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *((verb, kind) for verb, kind in cli.VERBS.items() if verb != "plan"),
        *((f"plan {name}", kind) for name, kind in cli.PLANS.items()),
    ],
)
def test_help_lists_every_option_without_importing_torch(words: str, kind: type) -> None:
    program = (
        "import sys; from bertsmith.cli import run; code = run([*sys.argv[1:], '--help']);"
        "heavy = {'torch', 'numpy', 'pyarrow', 'sklearn', 'tokenizers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: bertsmith {words}" in done.stdout
    for key in cli._keys_of(kind):
        assert f"--{key}" in done.stdout


def test_options_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nseed: 3\noptim:\n  learning_rate: 1e-3\n  beta2: 0.9\n")
    config = parsed(
        "pretrain", *NEEDED, "--config", str(file), "--seed", "5", "--optim.beta2", "0.95"
    )
    assert isinstance(config, PretrainConfig)
    assert (config.steps, config.seed, config.optim.learning_rate) == (7, 5, 1e-3)
    assert (config.optim.beta2, config.optim.beta1) == (0.95, 0.9)


def test_a_printed_config_gives_the_same_config_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*NEEDED, "--steps", "3", "--masking.share", "0.3"]
    assert cli.run(["pretrain", *options, "--print_config"]) == cli.EXIT_OK
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert parsed("pretrain", "--config", str(file)) == parsed("pretrain", *options)


def test_input_takes_every_word_that_follows() -> None:
    config = parsed("prepare", "--input", "a b.txt", "c.txt", "--output", "o")
    assert isinstance(config, PrepareConfig)
    assert list(config.input) == ["a b.txt", "c.txt"]


def test_a_lone_flag_is_true_and_a_flag_can_be_told_false() -> None:
    config = parsed("pretrain", *NEEDED, "--resume", "--optim.decay_embeddings", "false")
    assert isinstance(config, PretrainConfig)
    assert config.resume
    assert not config.optim.decay_embeddings
    assert not config.overwrite


def test_finetune_names_its_dev_table_eval() -> None:
    config = parsed("finetune", *NEEDED, "--eval", "dev.csv")
    assert isinstance(config, FinetuneConfig)
    assert config.eval == "dev.csv"


def test_a_list_takes_all_its_words() -> None:
    config = parsed(
        "finetune",
        *NEEDED,
        *("--table.label_columns", "joy", "on, off", "1"),
        *("--lora.targets", "[query,value]"),
        *("--search.epochs", "2", "3.5"),
    )
    assert isinstance(config, FinetuneConfig)
    assert config.table.label_columns == ["joy", "on, off", "1"]
    assert config.lora.targets == ["query", "value"]
    assert config.search.epochs == [2.0, 3.5]


@pytest.mark.parametrize(
    ("words", "columns"),
    [(["nullable"], ["nullable"]), (["null"], None), (["null", "joy"], ["null", "joy"])],
)
def test_only_the_word_null_is_no_list(words: list[str], columns: list[str] | None) -> None:
    config = parsed("finetune", *NEEDED, "--table.columns", *words)
    assert isinstance(config, FinetuneConfig)
    assert config.table.columns == columns
    prepared = parsed("prepare", "--output", "o", "--input", "null.txt")
    assert isinstance(prepared, PrepareConfig)
    assert prepared.input == ["null.txt"]


@pytest.mark.parametrize("more", [[], ["--model", "bert-base"]])
def test_what_can_be_planned_is_said(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert cli.run(["plan", *more, "--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: bertsmith plan pretrain " in said
    assert "usage: bertsmith plan finetune " in said


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["pretrian"], "did you mean pretrain?"),
        (["pretrain", *NEEDED, "--stpes", "3"], "unknown option --stpes; did you mean steps?"),
        (["pretrain", *NEEDED, "--learning_rate", "1"], "did you mean optim.learning_rate?"),
        (["pretrain", *NEEDED, "--steps", "x"], "--steps: 'x' is not a whole number or null"),
        (["pretrain", *NEEDED, "--precision", "fp8"], "is not one of auto, fp32, bf16, fp16"),
        (["pretrain", *NEEDED, "--masking.share", "1.5"], "share is 1.5; it must lie between"),
        (["pretrain", *NEEDED, "--optim.learning_rate", "-1"], "must not be negative"),
        (["pretrain", "--data", "d", "--model", "m"], "output"),
        (["pretrain", *NEEDED, "--config", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["pretrain", *NEEDED, "stray"], "stray"),
        (["pretrain", *NEEDED, "--model.preset", "x"], "--model.preset; model itself is a text"),
        (["pretrain", *NEEDED, "--step", "3"], "unknown option --step; did you mean steps?"),
        (["pretrain", *NEEDED, "--lr", "3"], "--lr; did you mean optim.learning_rate?"),
        (["finetune", *NEEDED, "--batch_size", "3"], "did you mean examples_per_step?"),
        (["pretrain", *NEEDED, "--batch_size", "3"], "did you mean tokens_per_step?"),
        (["finetune", *NEEDED, "--search.epochs", "2", "x"], "is not a list of numbers"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    assert expected in error_of(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 3\noptim:\n  lerning_rate: 1\n", "run.yaml:3: unknown key 'optim.lerning_rate'"),
        ("steps: 3\nsteps: 4\n", "run.yaml:2: key 'steps' stands twice"),
        ("- 1\n", "run.yaml:1: a config file is a mapping"),
        ("steps: [3\n", "not valid YAML"),
        ("steps: !!python/object/apply:os.system ['true']\n", "run.yaml:1: a config runs no code"),
        ("steps: &a 3\nseed: *a\n", "run.yaml:2: a config holds no alias"),
        ("seed: 1\nsteps: many\n", "run.yaml:2: 'many' is not a whole number or null"),
        ("masking:\n  share: 2\n", "run.yaml:2: share is 2.0; it must lie between"),
    ],
)
def test_a_mistake_in_the_file_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert expected in error_of(capsys, "pretrain", *NEEDED, "--config", str(file))


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UserError):
        cli.run(["pretrian", "--debug"])


def test_a_crash_in_a_library_names_the_line_of_python() -> None:
    """SIGBUS: a mapped file that was cut short."""
    crash = """
import os, signal
import bertsmith.cli
from bertsmith.__main__ import main
bertsmith.cli.run = lambda argv: os.kill(os.getpid(), signal.SIGBUS)
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "__main__.py" in done.stderr
