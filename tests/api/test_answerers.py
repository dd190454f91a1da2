"""The estimator of answers is the command, and takes rows as programs hold them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pandas
import pytest
from sklearn.base import clone

import bertsmith
from bertsmith.errors import UserError
from bertsmith.recipes.config import FinetuneConfig, PredictConfig
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.predict import predict
from bertsmith.train.config import OptimConfig

ROWS: list[dict[str, Any]] = [
    {
        "question": f"{color} film",
        "context": f"the {color} film {n} is good",
        "answers": {"text": [n], "answer_start": [len(f"the {color} film ")]},
    }
    for color in ("good", "bad", "a", "b")
    for n in ("c", "d", "e")
]


def new(encoder_folder: Path, **more: Any) -> "bertsmith.QuestionAnswerer":
    values: dict[str, Any] = {"epochs": 2.0, "examples_per_step": 4, "precision": "fp32"}
    return bertsmith.QuestionAnswerer(str(encoder_folder), device="cpu", **(values | more))


def test_fit_and_predict_are_the_commands(encoder_folder: Path, tmp_path: Path) -> None:
    model = new(encoder_folder).fit(ROWS, eval_set=ROWS[:3])
    data, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dev.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    config = FinetuneConfig(
        model=str(encoder_folder),
        data=str(data),
        eval=str(dev),
        output=str(tmp_path / "run"),
        epochs=2.0,
        examples_per_step=4,
        precision="fp32",
        device="cpu",
        optim=OptimConfig(learning_rate=1e-4, warmup_share=0.1, beta2=0.999, eps=1e-8),
    )
    summary = finetune(config)
    assert summary.metrics == model.summary_.metrics
    output = tmp_path / "said.jsonl"
    predict(
        PredictConfig(
            model=str(tmp_path / "run"),
            data=str(data),
            output=str(output),
            precision="fp32",
            device="cpu",
        )
    )
    theirs = [json.loads(line) for line in output.read_text().splitlines()]
    ours = model.answers(ROWS)
    assert [{**row, "id": ""} for row in ours] == [{**row, "id": ""} for row in theirs]
    asked = [{"question": row["question"], "context": row["context"]} for row in ROWS]
    assert model.predict(asked) == [row["answer"] for row in theirs]
    assert model.score(ROWS[:3]) == pytest.approx(summary.metrics["f1"])

    table = pandas.DataFrame(ROWS)
    assert model.predict(table) == model.predict(asked)
    columns = {key: [row[key] for row in ROWS] for key in ROWS[0]}
    assert model.predict(columns) == model.predict(asked)

    model.save(tmp_path / "kept")
    again = bertsmith.QuestionAnswerer.load(tmp_path / "kept")
    assert again.predict(asked) == model.predict(asked)
    assert pickle.loads(pickle.dumps(model)).predict(asked) == model.predict(asked)
    assert clone(model).get_params() == model.get_params()


def test_what_a_table_leaves_open_is_missing_and_answers_are_not_asked_for(
    encoder_folder: Path,
) -> None:
    table = pandas.DataFrame([ROWS[0], ROWS[1] | {"is_impossible": False}, *ROWS[2:]])
    model = new(encoder_folder, epochs=1.0).fit(table)
    round_and_round: list[Any] = []
    round_and_round.append(round_and_round)
    asked = [{**ROWS[0], "answers": round_and_round}]
    assert model.predict(asked) == model.predict(ROWS[:1])
    with pytest.raises(UserError, match="holds itself"):
        new(encoder_folder).fit(asked)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([5], "questions, row 0: is a int, not a mapping"),
        ([ROWS[0], ROWS[1] | {"context": ""}], "questions, row 1: the context is empty"),
        (
            [ROWS[0] | {"answers": {"text": ["c"], "answer_start": [0]}}],
            "questions, row 0: the answer 'c' does not stand at 0, where 't' stands; it stands at",
        ),
        ([ROWS[0] | {"id": "x"}, ROWS[1] | {"id": "x"}], "row 1: the id 'x' is that of an earlier"),
        ([], "there are no questions"),
        ({"text": ["a"]}, "the table has no column `question`"),
    ],
)
def test_a_bad_row_is_named(encoder_folder: Path, rows: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        new(encoder_folder).fit(rows)


def test_a_model_of_another_kind_is_refused(encoder_folder: Path) -> None:
    with pytest.raises(UserError, match="holds no model that finds answers"):
        bertsmith.QuestionAnswerer.load(encoder_folder)
    with pytest.raises(UserError, match="is not fitted yet"):
        new(encoder_folder).predict(ROWS)
