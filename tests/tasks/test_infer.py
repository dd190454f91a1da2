"""The task follows from the labels, is said with its reason, and can be set."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.data.config import TableConfig
from bertsmith.data.label_sets import find_separator
from bertsmith.data.tables import read_cells
from bertsmith.errors import UserError
from bertsmith.tasks.config import TaskName
from bertsmith.tasks.infer import ChosenTask, choose_task

Choose = Callable[..., ChosenTask]


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    def chosen(labels: list[object], asked: TaskName = "auto", **table: object) -> ChosenTask:
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({"text": "a", "label": x}) + "\n" for x in labels))
        config = TableConfig(**table)  # type: ignore[arg-type]
        return choose_task(asked, read_cells(path, config), config)

    return chosen


@pytest.mark.parametrize(
    ("labels", "name", "says"),
    [
        (["pos", "neg"], "classification", "2 different words"),
        ([1, 2, 5], "classification", "3 whole numbers"),
        (["1", "0", "1"], "classification", "2 whole numbers"),
        ([1.0, 2.0, 1.0], "classification", "written with a point (were they scores: --task reg"),
        (["1.0", "2.0"], "classification", "written with a point"),
        ([True, False], "classification", "2 different words"),
        ([0.5, 1.0, 2], "regression", "the label 0.5 of"),
        (["1", "2", "2.75"], "regression", "were they names of classes: --task classification"),
        (["0.1", "0.2", *["1.5"] * 20, "n/a"], "regression", "no whole number"),
        (list(range(30)), "regression", "30 different numbers in 30 rows"),
        ([["a"], ["a", "b"], []], "multilabel", "is a list"),
        (['["a"]', '["a", "b"]'], "multilabel", "lists in JSON"),
        (["a|b", "a", "b", ""], "multilabel", "several, separated by '|'"),
        (["approval,neutral", "neutral", "approval"], "multilabel", "separated by ','"),
        (["Arts, Crafts", "Music", "Sports"], "classification", "3 different words"),
        (["New York, NY", "Albany, NY", "Paris"], "classification", "3 different words"),
        ([None, "", "a", "b"], "classification", "2 different words"),
    ],
)
def test_the_kind_and_its_reason(
    choose: Choose, labels: list[object], name: str, says: str
) -> None:
    found = choose(labels)
    assert found.kind.name == name
    assert f"task: {name}, because" in found.said
    assert says in found.said
    assert "--task" in found.said


@pytest.mark.parametrize("asked", ["classification", "multilabel", "regression"])
def test_a_task_that_is_set_is_taken(choose: Choose, asked: TaskName) -> None:
    found = choose([1.5, 2.5], asked)
    assert found.kind.name == asked
    assert found.said == f"task: {asked}, as --task says"


def test_a_separator_is_found_also_when_the_task_is_set_and_can_be_given(choose: Choose) -> None:
    found = choose(["a;b", "a", "b"], "multilabel")
    assert found.kind.label_separator == ";"
    assert found.said.endswith("labels are separated by ';' (--table.label_separator)")
    given = choose(["a b", "c"], label_separator=" ")
    assert (given.kind.name, given.kind.label_separator) == ("multilabel", " ")


def test_one_column_a_label_is_for_several_labels_only(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,joy,anger\na,1,0\nb,0,0\n")
    config = TableConfig(label_columns=["joy", "anger"])
    cells = read_cells(tmp_path / "t.csv", config)
    assert choose_task("auto", cells, config).kind.name == "multilabel"
    with pytest.raises(UserError, match="are for --task multilabel, not regression"):
        choose_task("regression", cells, config)


def test_a_separator_needs_parts_that_occur_elsewhere() -> None:
    assert find_separator(["a,b", "a", "b"]) == ","
    assert find_separator(["a,b", "c,d"]) is None
    assert find_separator(["a|b", "a", "b,c", "b"]) == "|"
    assert find_separator(["x,y", "x,z", "x"], known=("x", "y", "z")) == ","
    assert find_separator([]) is None
