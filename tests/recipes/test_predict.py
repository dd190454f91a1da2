"""Predictions are those of transformers, in the order of the table, and never half written."""

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import pipeline

from bertsmith.errors import UserError
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predict import main, predict
from bertsmith.recipes.task_file import TASK_FILE
from bertsmith.recipes.texts import predict as predict_recipe

LABELS = ("neg", "pos", "so so")
MakeClassifier = Callable[..., Path]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def some_texts(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["good", "bad", "film", "the", "zebra", "fjord", "42", "ox"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


def write_csv(path: Path, columns: dict[str, list[str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def settings(model: Path, data: Path | str, output: Path | str) -> PredictConfig:
    return PredictConfig(
        model=str(model), data=str(data), output=str(output), precision="fp32", tokens_per_pack=64
    )


@pytest.mark.parametrize("pair", [False, True])
def test_labels_and_probabilities_are_those_of_the_transformers_pipeline(
    tmp_path: Path, make_classifier: MakeClassifier, pair: bool
) -> None:
    folder = make_classifier(labels=LABELS, pair=pair, seed=2)
    texts, seconds = some_texts(41), some_texts(41)[::-1]
    columns = {"text": texts, "text_b": seconds} if pair else {"text": texts}
    data = write_csv(tmp_path / "new.csv", columns)
    predict(settings(folder, data, tmp_path / "out.jsonl"))
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    oracle = pipeline("text-classification", model=str(folder), top_k=None)
    inputs = (
        [{"text": a, "text_pair": b} for a, b in zip(texts, seconds, strict=True)]
        if pair
        else texts
    )
    for row, expected in zip(found, oracle(inputs, truncation=True), strict=True):
        assert row["prediction"] == expected[0]["label"]
        chances = {e["label"]: e["score"] for e in expected}
        assert row["probabilities"] == pytest.approx(chances, abs=2e-6)
    assert [r["text"] for r in found] == texts
    assert len({r["prediction"] for r in found}) > 1


def test_order_and_other_columns_are_kept_over_many_chunks(
    tmp_path: Path, make_classifier: MakeClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_classifier(labels=LABELS)
    ids = [f"row-{i}" for i in range(50)]
    columns = {"id": ids, "text": some_texts(50), "label": ["?"] * 50}
    data = write_csv(tmp_path / "new.csv", columns)
    predict(settings(folder, data, tmp_path / "one.csv"))
    monkeypatch.setattr(predict_recipe, "ROWS_PER_CHUNK", 7)
    summary = predict(settings(folder, data, tmp_path / "many.csv"))
    assert summary.num_rows == 50
    one, many = (read_csv(tmp_path / n) for n in ("one.csv", "many.csv"))
    assert [r["id"] for r in many] == ids
    assert list(many[0]) == [
        "id",
        "text",
        "label",
        "prediction",
        *(f"probability_{x}" for x in LABELS),
    ]
    for a, b in zip(one, many, strict=True):
        chances = [[float(r[f"probability_{x}"]) for x in LABELS] for r in (a, b)]
        assert chances[0] == pytest.approx(chances[1], abs=1e-5)
        assert sum(chances[0]) == pytest.approx(1, abs=1e-5)
        assert b["prediction"] == LABELS[chances[1].index(max(chances[1]))]


def test_lines_of_standard_input_become_csv_on_standard_output(
    make_classifier: MakeClassifier,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_classifier(labels=LABELS)
    lines = io.TextIOWrapper(io.BytesIO(b'good film\r\n"bad, film\nthe end\n\n'))
    monkeypatch.setattr("sys.stdin", lines)
    assert main(settings(folder, "-", "-")) == 0
    printed = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert [r["text"] for r in rows] == ["good film", '"bad, film', "the end"]
    assert "3 texts labelled" in printed.err


def test_cells_that_a_spreadsheet_would_run_are_escaped_in_csv_only(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    folder = make_classifier(labels=("=neg", "pos"))
    texts = ["=cmd()", "+good", "-5", "@film", "-good film", "good=bad"]
    data = write_csv(tmp_path / "new.csv", {"text": texts})
    predict(settings(folder, data, tmp_path / "out.csv"))
    rows = read_csv(tmp_path / "out.csv")
    assert [r["text"] for r in rows] == [
        "'=cmd()",
        "'+good",
        "-5",
        "'@film",
        "'-good film",
        "good=bad",
    ]
    assert {r["prediction"] for r in rows} <= {"'=neg", "pos"}
    predict(settings(folder, data, tmp_path / "out.jsonl"))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


@pytest.mark.parametrize("row", [3, 9])
def test_a_bad_row_leaves_no_output_behind(
    tmp_path: Path, make_classifier: MakeClassifier, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    monkeypatch.setattr(predict_recipe, "ROWS_PER_CHUNK", 4)
    texts = some_texts(12)
    texts[row - 1] = " "
    data = write_csv(tmp_path / "new.csv", {"id": ["x"] * 12, "text": texts})
    folder = make_classifier(labels=LABELS)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=rf"new.csv:{row + 1} \(row {row}\): the text is empty"):
        predict(settings(folder, data, tmp_path / "out.csv"))
    assert sorted(tmp_path.iterdir()) == before


def test_long_texts_are_cut_where_that_is_asked_for_and_counted(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    folder = make_classifier(labels=LABELS)
    data = write_csv(tmp_path / "new.csv", {"text": ["good " * 31, "good " * 30]})
    asked = replace(settings(folder, data, tmp_path / "out.csv"), max_sequence_tokens=32)
    assert predict(asked).num_cut == 1


def test_a_text_of_3000_tokens_is_read_in_windows(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    """The reference cuts the words itself, runs each window through transformers, and averages."""
    folder = make_classifier(labels=LABELS, seed=2)
    (folder / TASK_FILE).unlink(missing_ok=True)  # a model from elsewhere says nothing of windows
    draw = random.Random(3)
    words = draw.choices(["good", "bad", "film", "the"], k=3000)
    data = write_csv(tmp_path / "new.csv", {"text": ["good film", " ".join(words), "bad"]})
    assert predict(settings(folder, data, tmp_path / "out.csv")).num_cut == 0
    found = read_csv(tmp_path / "out.csv")

    room, overlap = 30, 7  # of 32 positions two are special; a quarter of what is left
    starts = range(0, 3000 - overlap, room - overlap)
    windows = [" ".join(words[start : start + room]) for start in starts]
    oracle = pipeline("text-classification", model=str(folder), top_k=None)
    sums = dict.fromkeys(LABELS, 0.0)
    for answer in oracle(windows):
        for one in answer:
            sums[one["label"]] += one["score"] / len(windows)
    chances = {name: float(found[1][f"probability_{name}"]) for name in LABELS}
    assert chances == pytest.approx(sums, abs=2e-6)
    assert found[1]["prediction"] == max(sums, key=lambda name: sums[name])
    short = {one["label"]: one["score"] for one in oracle(["good film"])[0]}
    assert {name: float(found[0][f"probability_{name}"]) for name in LABELS} == pytest.approx(
        short, abs=2e-6
    )


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("out.xlsx", "the ending must be .csv or .jsonl"),
        ("absent/out.csv", "there is no folder"),
        ("there.csv", "exists already"),
        ("new.csv", "is the table itself"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    tmp_path: Path, output: str, says: str
) -> None:
    data = write_csv(tmp_path / "new.csv", {"text": ["a"]})
    (tmp_path / "there.csv").touch()
    with pytest.raises(UserError, match=says):
        predict(settings(tmp_path / "no model", data, tmp_path / output))


def test_a_column_that_would_be_overwritten_is_refused(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    data = write_csv(tmp_path / "new.csv", {"text": ["a"], "prediction": ["x"]})
    folder = make_classifier(labels=LABELS)
    with pytest.raises(UserError, match="'prediction' is there already"):
        predict(settings(folder, data, tmp_path / "out.csv"))


def test_a_model_of_pairs_says_what_is_missing(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    data = write_csv(tmp_path / "new.csv", {"text": ["a"]})
    folder = make_classifier(labels=LABELS, pair=True)
    with pytest.raises(UserError, match="pairs of texts are needed"):
        predict(settings(folder, data, tmp_path / "out.csv"))
