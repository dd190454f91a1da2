"""`bertsmith coverage` tells beforehand what a run reports afterwards."""

import json
import re
from pathlib import Path

import pytest

from bertsmith.cli import run
from small_world import sentences, write_model_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coverage")
    (folder / "text.txt").write_text("\n".join(text for text, _ in sentences(400, seed=0)))
    command = ["prepare", "--input", str(folder / "text.txt"), "--output", str(folder / "data")]
    assert run([*command, "--documents", "line", "--vocab_size", "150", "--workers", "1"]) == 0
    return folder / "data"


SETTINGS = [
    "--packing.tokens_per_pack=256",
    "--packing.max_sequence_tokens=64",
    "--tokens_per_step=512",
    "--masking.share=0.2",
    "--seed=5",
]


def test_what_is_told_beforehand_is_what_a_run_reports(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = write_model_config(tmp_path / "shape.json")
    output = tmp_path / "run"
    command = ["pretrain", "--data", str(data), "--model", str(shape), "--output", str(output)]
    assert run([*command, "--epochs", "2.5", "--precision", "fp32", *SETTINGS]) == 0
    capsys.readouterr()
    told = ["coverage", "--data", str(data), "--epochs", "2.5", *SETTINGS]
    assert run([*told, "--json", "--plot", str(tmp_path / "plot.svg")]) == 0
    beforehand = json.loads(capsys.readouterr().out)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["coverage"] == beforehand
    assert beforehand["never_predicted_share"] == pytest.approx(1 - 2.5 * 0.2, abs=0.06)
    assert (beforehand["min_count"], beforehand["max_count"]) == (0, 1)
    assert set(beforehand["by_frequency"]) == {"rare", "middle", "frequent"}
    assert len(beforehand["least_trained"]) == 50
    plot = (tmp_path / "plot.svg").read_text()
    assert plot == (output / "coverage.svg").read_text()
    assert "<circle" in plot
    card = (output / "README.md").read_text()
    assert "## Coverage" in card
    assert "coverage.svg" in card
    lines = [json.loads(x) for x in (output / "metrics.jsonl").read_text().splitlines()]
    shares = [
        x["coverage_never_predicted_share"] for x in lines if "coverage_never_predicted_share" in x
    ]
    # At each evaluation: the same while an epoch lasts.
    assert list(dict.fromkeys(shares)) == pytest.approx([0.8, 0.6], abs=0.03)
    assert run(told) == 0
    out = capsys.readouterr().out
    least = re.search(r"Least trained, with times predicted and occurrences: (.*)", out)
    assert least is not None
    assert len(re.findall(r"`[^`]+` [\d,]+ of [\d,]+(?:, |$)", least[1])) == 50


def test_covering_leaves_nothing_after_five_epochs_of_a_fifth(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["coverage", "--data", str(data), "--epochs", "5", "--json", *SETTINGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["min_count"], found["never_predicted_share"]) == (1, 0.0)
    assert found["types_never_predicted"] == 0


def test_mistakes_are_one_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--epochs", "0"], "epochs is 0.0; it must be over 0"),
        (["--epochs", "1", "--masking.share", "1.5"], "share is 1.5"),
    ):
        assert run(["coverage", "--data", str(data), *words]) == 2
        assert message in capsys.readouterr().err
