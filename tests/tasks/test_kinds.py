"""What kinds decide: weights as scikit-learn's, thresholds that are best, splits, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from sklearn.utils.class_weight import compute_class_weight

from bertsmith.data.config import TableConfig
from bertsmith.data.tables import read_cells
from bertsmith.errors import UserError
from bertsmith.model.objectives import BinaryCrossEntropy, CrossEntropy
from bertsmith.tasks import weights
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.config import DecideConfig, LossConfig
from bertsmith.tasks.decisions import Decisions, best_threshold
from bertsmith.tasks.kind import TaskKind
from bertsmith.tasks.multilabel import Multilabel
from bertsmith.tasks.regression import Regression


def read(kind: TaskKind[Any], path: Path, content: str, **config: Any) -> Any:
    path.write_text(content)
    table = TableConfig(**config)
    return kind.read(read_cells(path, table), table)


def test_balanced_weights_are_those_of_sklearn() -> None:
    labels_N = torch.tensor([0, 1, 1, 1, 2, 2])
    objective = Classification().objective(
        LossConfig(class_weights="balanced"), labels_N, ("a", "b", "c")
    )
    assert isinstance(objective, CrossEntropy)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels_N.numpy())
    assert objective.class_weights_C == pytest.approx(expected.tolist())


def test_effective_weights_worked_by_hand() -> None:
    """beta 0.9, 1 and 2 examples: 1/1 and 1/1.9, scaled to a sum of 2 (Cui et al., eq. 2)."""
    found = weights.effective(torch.tensor([1, 2]), 0.9)
    assert found.tolist() == pytest.approx([2 * 1 / (1 + 1 / 1.9), 2 * (1 / 1.9) / (1 + 1 / 1.9)])
    assert weights.effective(torch.tensor([3, 9]), 0.0).tolist() == [1.0, 1.0]


def test_weights_of_several_labels_balance_each_label_by_itself() -> None:
    targets = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    balanced = Multilabel().objective(LossConfig(class_weights="balanced"), targets, ("a", "b"))
    assert isinstance(balanced, BinaryCrossEntropy)
    for c in range(2):
        expected = compute_class_weight("balanced", classes=np.arange(2), y=targets[:, c].numpy())
        assert balanced.absent_weights_C is not None
        assert balanced.present_weights_C is not None
        found = (balanced.absent_weights_C[c], balanced.present_weights_C[c])
        assert found == pytest.approx(tuple(expected))
    by_hand = Multilabel().objective(LossConfig(class_weights="{b: 5}"), targets, ("a", "b"))
    assert isinstance(by_hand, BinaryCrossEntropy)
    assert by_hand.present_weights_C == (1.0, 5.0)
    assert by_hand.absent_weights_C == (1.0, 1.0)


def test_given_weights_name_labels_the_task_has() -> None:
    loss = LossConfig(class_weights={"b": 2, "1": 0.5})
    assert LossConfig(class_weights=loss.class_weights) == loss
    objective = Classification().objective(loss, torch.tensor([0, 1]), ("1", "b"))
    assert isinstance(objective, CrossEntropy)
    assert objective.class_weights_C == (0.5, 2.0)
    with pytest.raises(UserError, match="there is no label '1'; the labels are 'a', 'b'"):
        Classification().objective(loss, torch.tensor([0, 1]), ("a", "b"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"class_weights": "balance"}, "class_weights is 'balance'; give none, balanced"),
        ({"class_weights": "{a: 0}"}, "class_weights gives 'a' the weight 0; it must be > 0"),
        ({"class_weights": "{a: [}"}, "class_weights is"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"focal_gamma": -1.0}, "focal_gamma is -1.0"),
        ({"focal_gamma": 2.0, "label_smoothing": 0.1}, "pull apart"),
    ],
)
def test_losses_that_cannot_be_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"class_weights|label_smoothing|focal_gamma") as caught:
        LossConfig(**values)
    assert says in str(caught.value)


def test_numbers_have_no_classes_to_weigh_and_nothing_to_decide() -> None:
    targets = torch.tensor([1.0, 2.0])
    for loss, key in (
        (LossConfig(class_weights="balanced"), "class_weights"),
        (LossConfig(label_smoothing=0.1), "label_smoothing"),
        (LossConfig(focal_gamma=1.0), "focal_gamma"),
    ):
        with pytest.raises(UserError, match=f"--loss.{key}: is for tasks with labels"):
            Regression().objective(loss, targets, ("score",))
    with pytest.raises(UserError, match="--decide: is for tasks with labels"):
        Regression().check_decide(DecideConfig(calibrate=True))
    with pytest.raises(UserError, match="is for several labels a text"):
        Classification().check_decide(DecideConfig(thresholds="tuned"))


@given(values=st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=25))
def test_a_tuned_threshold_is_the_best_there_is(values: list[tuple[int, bool]]) -> None:
    chances_N = torch.tensor([v / 8 for v, _ in values])
    there_N = torch.tensor([t for _, t in values])
    threshold = best_threshold(chances_N, there_N)

    def f1_at(cut: float) -> float:
        return float(f1_score(there_N.numpy(), (chances_N > cut).numpy(), zero_division=0))

    assert 0.0 <= threshold <= 1.0
    best = max(f1_at(cut) for cut in [0.5, *(k / 8 - 1 / 16 for k in range(9))])
    assert f1_at(threshold) == pytest.approx(best)
    if not bool(there_N.any()):
        assert threshold == 0.5


def test_decisions_are_stored_by_label_and_come_back() -> None:
    decisions = Decisions(temperature=1.5, thresholds_C=(0.25, 0.5))
    stored = json.loads(json.dumps(decisions.as_json(("a", "b"))))
    assert Decisions.from_json(stored, ("a", "b"), where="f") == decisions
    assert Decisions.from_json(stored, ("b", "a"), where="f").thresholds_C == (0.5, 0.25)
    assert Decisions.from_json(None, ("a",), where="f") == Decisions()
    with pytest.raises(UserError, match="f: its decisions do not fit the model's labels"):
        Decisions.from_json(stored, ("a", "c"), where="f")


@pytest.mark.parametrize(
    ("kind", "content", "config", "says"),
    [
        (Regression(), "text,label\na,1.5\nb,\n", {}, "t.csv:3 (row 2): the score is missing"),
        (Regression(), "text,label\na,1.5\nb,nan\n", {}, "t.csv:3 (row 2): 'nan' is no number"),
        (Regression(), "text,label\na,high\n", {}, "t.csv:2 (row 1): 'high' is no number"),
        (Regression(), "text,label\na,1e999\n", {}, "t.csv:2 (row 1): the score '1e999' is not fi"),
        (Regression(), "text,label\n", {}, "the table has no rows to use"),
        (Multilabel("|"), "text,label\na,x||y\n", {}, "t.csv:2 (row 1): the label is empty"),
        (Multilabel("|"), "text,label\na,x|y|x\n", {}, "the label 'x' stands twice in a list"),
        (Multilabel(), 'text,label\na,"[0, 0, 1]"\n', {}, "a row of 0 and 1"),
        (
            Multilabel(),
            "text,p,q\na,1,0\nb,0,2\n",
            {"label_columns": ["p", "q"]},
            "t.csv:3 (row 2): '2' is neither 0 nor 1 (column 'q')",
        ),
        (
            Multilabel(),
            "text,p,q\na,1,0\nb,,1\n",
            {"label_columns": ["p", "q"]},
            "t.csv:3 (row 2): the label is empty (column 'p')",
        ),
        (
            Multilabel(),
            "text,p\na,1\n",
            {"label_columns": ["p", "r"]},
            "no column 'r' (--table.label_columns)",
        ),
    ],
)
def test_bad_cells_are_named_with_their_row(
    tmp_path: Path, kind: TaskKind[Any], content: str, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        read(kind, tmp_path / "t.csv", content, **config)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    content = "text,label\na,1.5\nb,x\n ,2\nc,3\n"
    table = read(Regression(), tmp_path / "t.csv", content, bad_rows="skip")
    assert table.labels == (1.5, 3.0)
    assert table.texts == ("a", "c")
    assert table.rows == (1, 4)
    assert table.skipped_rows == 2


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ("x|y", ("x", "y")),
        (" x | y ", ("x", "y")),
        ("", ()),
        ('"[""x"", 1, 2.0]"', ("x", "1", "2")),
        ("[so] so", ("[so] so",)),
        ("x", ("x",)),
    ],
)
def test_label_lists_in_one_column(tmp_path: Path, cell: str, labels: tuple[str, ...]) -> None:
    table = read(Multilabel("|"), tmp_path / "t.csv", f"text,label\na,{cell}\n")
    assert table.labels == (labels,)


def test_labels_are_ordered_and_unknown_ones_named_with_their_row(tmp_path: Path) -> None:
    table = read(Multilabel("|"), tmp_path / "t.csv", "text,label\na,10|9\nb,\nc,9\n")
    kind = Multilabel("|")
    assert kind.output_names(table) == ("9", "10")
    targets = kind.targets(table, ("9", "10"), known_from="there")
    assert targets.tolist() == [[1, 1], [0, 0], [1, 0]]
    with pytest.raises(UserError, match=r"t.csv:2 \(row 1\): the label '10' does not occur in x"):
        kind.targets(table, ("9",), known_from="x")
    with pytest.raises(UserError, match="no row has a label"):
        kind.output_names(read(kind, tmp_path / "t.csv", "text,label\na,\nb,[]\n"))


def test_a_column_without_any_1_is_named(tmp_path: Path) -> None:
    kind = Multilabel()
    columns = ["q", "p"]
    table = read(kind, tmp_path / "t.csv", "text,p,q\na,1,0\nb,0,yes\n", label_columns=columns)
    assert kind.output_names(table) == ("q", "p")
    table = read(kind, tmp_path / "t.csv", "text,p,q\na,1,0\nb,0,0\n", label_columns=columns)
    with pytest.raises(UserError, match="no row has the label 'q'"):
        kind.output_names(table)


def test_numbers_are_held_out_by_text_whatever_their_order(tmp_path: Path) -> None:
    rows = [f"text {i},{i / 7}" for i in range(60)]
    one, other = (
        read(Regression(), tmp_path / "t.csv", "text,label\n" + "\n".join(some))
        for some in (rows, rows[::-1])
    )
    kept, held = Regression().holdout(one, share=0.1, seed=3)
    assert sorted(kept + held) == list(range(60))
    assert len(held) == 6
    _, again = Regression().holdout(other, share=0.1, seed=3)
    assert {one.texts[i] for i in held} == {other.texts[i] for i in again}
    assert held != Regression().holdout(one, share=0.1, seed=4)[1]


def test_rare_labels_stay_in_training_when_a_part_is_held_out(tmp_path: Path) -> None:
    rows = ["t,common"] * 50 + ["t,common|rare"] * 3 + ["t,"] * 10 + ["t,single|common"]
    table = read(Multilabel("|"), tmp_path / "t.csv", "text,label\n" + "\n".join(rows))
    kept, held = Multilabel("|").holdout(table, share=0.3, seed=0)
    assert len(held) == 19
    learned = {name for i in kept for name in table.labels[i]}
    assert learned == {"common", "rare", "single"}
    assert any("rare" in table.labels[i] for i in held)


def test_what_cannot_be_judged_is_said() -> None:
    assert (
        "all have the label 'b'"
        in Classification().warnings(torch.tensor([1, 1]), ("a", "b"), what="these")[0]
    )
    assert not Classification().warnings(torch.tensor([0, 1]), ("a", "b"), what="these")
    absent = Multilabel().warnings(torch.tensor([[1.0, 0.0]]), ("a", "b"), what="these")
    assert "1 of 2 labels have no example among these ('b')" in absent[0]
    assert "correlations are 0" in Regression().warnings(torch.ones(2), ("s",), what="these")[0]
