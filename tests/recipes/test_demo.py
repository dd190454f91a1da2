"""The demo runs the whole path on what is installed and tells what it found."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.data.docstring_task import TaskSizes
from bertsmith.data.docstrings import Docstring, harvest, installed_packages
from bertsmith.errors import UserError
from bertsmith.recipes import demo as module
from bertsmith.recipes.config import DemoConfig

PACKAGES = ("numpy", "rich", "yaml")


def small_harvest(*, on_package: Callable[[int, int, str], None]) -> list[Docstring]:
    chosen = [p for p in installed_packages() if p.name in PACKAGES]
    assert len(chosen) == len(PACKAGES)
    return harvest(chosen, on_package=on_package)


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "harvest", small_harvest)
    monkeypatch.setattr(module, "SIZES", (TaskSizes(num_labels=2, train=12, dev=6, test=20),))
    monkeypatch.setattr(module, "MODEL", "bert-tiny")
    monkeypatch.setattr(module, "FINETUNE_EPOCHS", 2)


@pytest.mark.usefixtures("small_demo")
def test_the_whole_path_runs_and_its_figures_stand_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert module.main(DemoConfig(output=str(folder), minutes=0.1, seeds=2)) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["labels"] == ["numpy", "rich"]
    assert summary["train_examples"] == 24
    assert summary["test_examples"] == 40
    assert summary["pretrain_tokens"] > 0
    for side in ("pretrained", "random"):
        accuracies = summary[f"accuracy_{side}"]
        assert len(accuracies) == 2
        assert all(0.0 <= a <= 1.0 for a in accuracies)
    assert len(summary["blanks"]) == module.NUM_BLANKS
    for blank in summary["blanks"]:
        assert "[MASK]" in blank["text"]
        assert len(blank["guesses"]) == 5
    shown = capsys.readouterr().out
    assert "pretrained weights" in shown
    assert "random weights" in shown
    for place in ("pretrained/model", "task-pretrained-1/model", "task-random-0/model"):
        assert (folder / place / "model.safetensors").is_file()
    assert "| random weights |" in (folder / "README.md").read_text()


@pytest.mark.usefixtures("small_demo")
def test_no_text_of_the_test_is_pretrained_or_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    module.demo(DemoConfig(output=str(folder), minutes=0.02, seeds=1))

    def texts_of(name: str) -> set[str]:
        with (folder / name).open(newline="", encoding="utf-8") as file:
            return {row["text"] for row in csv.DictReader(file)}

    assert not texts_of("test.csv") & texts_of("train-0.csv")
    assert not texts_of("test.csv") & texts_of("dev.csv")
    lines = (folder / "docstrings.jsonl").read_text().splitlines()
    trained_on = "\n".join(json.loads(line)["text"] for line in lines)
    plain = [t for t in texts_of("test.csv") if "package" not in t]  # no name was hidden in these
    assert plain
    assert not [t for t in plain if t in trained_on]


def test_too_few_packages_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "harvest", lambda on_package: [])
    with pytest.raises(UserError, match="too little text"):
        module.demo(DemoConfig(output=str(tmp_path / "demo")))


@pytest.mark.parametrize("values", [{"minutes": 0.0}, {"seeds": 0}])
def test_values_out_of_range_are_refused(values: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--minutes must be over 0"):
        module.demo(DemoConfig(output=str(tmp_path / "demo"), **values))  # type: ignore[arg-type]
    assert not (tmp_path / "demo").exists()


def test_a_mean_is_shown_with_its_spread() -> None:
    assert module.spread([0.5, 0.7]) == "60.0% +- 14.1%"
    assert module.spread([0.5]) == "50.0% (one seed)"
