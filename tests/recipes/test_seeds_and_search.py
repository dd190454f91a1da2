"""Several seeds and searches: what they sum up, keep, go on with and refuse."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bertsmith.cli import run
from bertsmith.errors import UserError
from bertsmith.recipes import several_runs
from bertsmith.recipes.config import FinetuneConfig, SearchConfig
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.search import search
from bertsmith.recipes.seeds import finetune_seeds, spread_of
from bertsmith.recipes.several_runs import InterruptedPartError
from bertsmith.train.config import OptimConfig


@pytest.fixture
def config(tmp_path: Path, tiny_encoder_folder: Path) -> FinetuneConfig:
    table = tmp_path / "train.csv"
    words = ("good", "bad")
    rows = [f"the film {'ox ' * (i % 5)}{words[i % 2]},{words[i % 2]}" for i in range(60)]
    table.write_text("text,label\n" + "\n".join(rows) + "\n")
    return FinetuneConfig(
        model=str(tiny_encoder_folder),
        data=str(table),
        output=str(tmp_path / "run"),
        epochs=1,
        holdout_share=0.3,
        precision="fp32",
        optim=OptimConfig(learning_rate=1e-3, beta2=0.999),
    )


def interrupt_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are fine-tuned from here on; the one of that number is interrupted."""
    begun: list[str] = []

    def once(part: FinetuneConfig) -> Any:
        begun.append(Path(part.output).name)
        if len(begun) - 1 == number:
            raise InterruptedPartError
        return finetune(part)

    monkeypatch.setattr(several_runs, "finetune", once)
    return begun


def test_mean_and_spread_are_those_of_the_textbook() -> None:
    found = spread_of([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    # The squared deviations from the mean, 5, add up to 32.
    assert found.mean == 5.0
    assert found.standard_deviation == pytest.approx((32 / 7) ** 0.5)
    assert found.standard_error == pytest.approx((32 / 7 / 8) ** 0.5)
    assert (found.least, found.most) == (2.0, 9.0)
    assert spread_of([0.5]).standard_error == 0.0


def test_each_seed_is_the_run_of_its_own_and_the_best_is_kept(
    config: FinetuneConfig, tmp_path: Path
) -> None:
    summary = finetune_seeds(replace(config, seeds=3, seed=4))
    folder = Path(config.output)
    alone = {}
    for seed in (4, 5, 6):
        of_seed = replace(config, seed=seed, output=str(tmp_path / f"alone-{seed}"))
        alone[seed] = finetune(of_seed).metrics
    assert summary.seeds == alone
    losses = [scores["loss"] for scores in alone.values()]
    assert summary.metrics["loss"].mean == pytest.approx(statistics.fmean(losses))
    best = max(alone, key=lambda seed: (alone[seed]["accuracy"], -alone[seed]["loss"]))
    assert summary.best_seed == best
    weights = "model/model.safetensors"
    expected = (tmp_path / f"alone-{best}" / weights).read_bytes()
    assert (folder / weights).read_bytes() == expected
    written = json.loads((folder / "seeds.json").read_text())
    assert written["best_seed"] == best
    for seed in alone:
        assert (folder / f"seed-{seed}" / "summary.json").exists()
        assert not (folder / f"seed-{seed}" / "model").exists()
        assert not (folder / f"seed-{seed}" / "checkpoints").exists()


def test_seeds_that_are_done_are_not_run_again(
    config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = replace(config, seeds=2, keep_models="all")
    begun = interrupt_at(1, monkeypatch)
    assert finetune_seeds(several).status == "interrupted"
    with pytest.raises(UserError, match="holds another run"):
        finetune_seeds(several)
    summary = finetune_seeds(replace(several, resume=True))
    assert begun == ["seed-0", "seed-1", "seed-1"]
    more = finetune_seeds(replace(several, resume=True, seeds=3))
    assert begun[3:] == ["seed-2"]
    assert {seed: more.seeds[seed] for seed in (0, 1)} == summary.seeds
    folder = Path(config.output)
    assert all((folder / f"seed-{seed}" / "model").is_dir() for seed in range(3))
    with pytest.raises(UserError, match=r"epochs was 1, is 2"):
        finetune_seeds(replace(several, resume=True, epochs=2))
    with Path(config.data).open("a") as file:
        file.write("the good,good\n")
    with pytest.raises(UserError, match="sha256 of data"):
        finetune_seeds(replace(several, resume=True))


RANGES = SearchConfig(trials=3, learning_rate=[1e-4, 1e-2], epochs=[1.0], examples_per_step=[8, 16])


def test_a_search_finds_the_best_of_its_trials_and_can_be_repeated(
    config: FinetuneConfig, tmp_path: Path
) -> None:
    summary = search(replace(config, search=RANGES))
    folder = Path(config.output)
    assert [one.number for one in summary.trials] == [0, 1, 2]
    for one in summary.trials:
        assert 1e-4 <= one.settings["optim.learning_rate"] <= 1e-2
        assert 0.7 <= one.settings["optim.layer_decay"] <= 1.0
        assert one.settings["examples_per_step"] in (8, 16)
        made_with = yaml.safe_load((folder / f"trial-00{one.number}" / "run.yaml").read_text())
        assert made_with["optim"]["learning_rate"] == one.settings["optim.learning_rate"]
    assert len({one.settings["optim.learning_rate"] for one in summary.trials}) == 3
    scores = [one.metrics or {} for one in summary.trials]
    best = max(range(3), key=lambda i: (scores[i]["accuracy"], -scores[i]["loss"]))
    assert summary.best_trial == best
    again = tmp_path / "again"
    assert run(["finetune", "--config", str(folder / "run.yaml"), "--output", str(again)]) == 0
    weights = "model/model.safetensors"
    assert (again / weights).read_bytes() == (folder / weights).read_bytes()


def test_an_interrupted_search_tries_the_same(
    config: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(replace(config, output=str(tmp_path / "whole"), search=RANGES))
    begun = interrupt_at(1, monkeypatch)
    assert search(replace(config, search=RANGES)).status == "interrupted"
    resumed = search(replace(config, search=RANGES, resume=True))
    assert resumed == whole
    assert begun == ["trial-000", "trial-001", "trial-001", "trial-002"]
    other = replace(config, search=replace(RANGES, layer_decay=[]), resume=True)
    with pytest.raises(UserError, match=r"search\.layer_decay was"):
        search(other)


def test_the_commands_print_a_table_and_the_model(
    config: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["finetune", "--model", config.model, "--data", config.data, "--epochs", "1"]
    common += ["--holdout_share", "0.3"]
    seeds, trials = tmp_path / "seeds", tmp_path / "trials"
    assert run([*common, "--output", str(seeds), "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "error of mean" in out
    assert out.splitlines()[-1] == str(seeds / "model")
    line = ["--search.trials", "2", "--search.learning_rate", "[1e-4, 1e-3]"]
    assert run([*common, "--output", str(trials), *line, "--search.epochs", "[]"]) == 0
    out = capsys.readouterr().out
    assert "2 trials, the best by accuracy first" in out
    assert out.splitlines()[-1] == str(trials / "model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seeds", "0"], "seeds is 0"),
        (["--seeds", "2", "--search.trials", "2"], "seeds is 2 and search.trials is given"),
        (["--search.trials", "2", "--search.learning_rate", "[1, 0.1]"], "learning_rate is"),
        (
            ["--seeds", "2", "--parallel.devices", "2"],
            "devices is 2; seeds and search.trials",
        ),
        (["--seeds", "2", "--model", "missing-folder/x/y"], "missing-folder"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    given: list[str], said: str, config: FinetuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["finetune", "--data", config.data, "--output", config.output]
    line += [] if "--model" in given else ["--model", config.model]
    assert run([*line, *given]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("bertsmith: error: ")
    assert said in error


def test_a_search_without_optuna_says_what_to_install(
    config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'bertsmith\[search\]'"):
        search(replace(config, search=RANGES))
    assert not Path(config.output).exists()
    with pytest.raises(UserError, match="finetune is one run"):
        finetune(replace(config, seeds=2))
