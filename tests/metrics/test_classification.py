"""Metrics agree with scikit-learn, and with themselves however the batches are cut."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from bertsmith.metrics import HIGHER_IS_BETTER, ClassificationMetrics, ClassificationTally


def tally(
    logits_NC: torch.Tensor, labels_N: torch.Tensor, *, batch: int = 1000
) -> ClassificationMetrics:
    counted = ClassificationTally(logits_NC.shape[1])
    for start in range(0, len(labels_N), batch):
        counted.add(logits_NC[start : start + batch], labels_N[start : start + batch])
    return counted.metrics([f"c{i}" for i in range(logits_NC.shape[1])])


def test_a_case_worked_by_hand() -> None:
    # True a a a b; predicted a a b b. a: precision 1, recall 2/3, F1 0.8. b: 1/2, 1, 2/3.
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    found = tally(logits, torch.tensor([0, 0, 0, 1]))
    assert found.confusion == ((2, 1), (0, 1))
    assert found.accuracy == 0.75
    assert [(s.precision, s.support) for s in found.labels] == [(1.0, 3), (0.5, 1)]
    assert [s.recall for s in found.labels] == pytest.approx([2 / 3, 1.0])
    assert found.macro_f1 == pytest.approx((0.8 + 2 / 3) / 2)
    assert found.weighted_f1 == pytest.approx((3 * 0.8 + 2 / 3) / 4)
    assert found.matthews_correlation == pytest.approx((2 * 1 - 1 * 0) / (3 * 1 * 2 * 2) ** 0.5)


@pytest.mark.parametrize(("examples", "classes"), [(500, 2), (300, 7), (40, 20), (3, 5)])
def test_scores_are_scikit_learns(examples: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(examples)
    logits = torch.randn(examples, classes, generator=generator)
    labels = torch.randint(classes, (examples,), generator=generator)
    found, true, predicted = tally(logits, labels), labels.numpy(), logits.argmax(1).numpy()
    every = list(range(classes))
    expected = {
        "accuracy": sklearn_metrics.accuracy_score(true, predicted),
        "macro_f1": sklearn_metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "weighted_f1": sklearn_metrics.f1_score(
            true, predicted, average="weighted", zero_division=0
        ),
        "matthews_correlation": sklearn_metrics.matthews_corrcoef(true, predicted),
        "loss": sklearn_metrics.log_loss(true, logits.double().softmax(1).numpy(), labels=every),
    }
    assert found.by_name() == pytest.approx(expected)
    assert set(expected) == set(HIGHER_IS_BETTER)
    by_label = sklearn_metrics.precision_recall_fscore_support(
        true, predicted, labels=every, zero_division=0
    )
    rows = [(s.precision, s.recall, s.f1, s.support) for s in found.labels]
    assert pytest.approx(np.array(by_label)) == np.array(rows).T
    confusion = sklearn_metrics.confusion_matrix(true, predicted, labels=every)
    assert found.confusion == tuple(tuple(row) for row in confusion.tolist())


def test_scores_do_not_depend_on_the_batches() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(101, 4, generator=generator)
    labels = torch.randint(4, (101,), generator=generator)
    whole, ones = tally(logits, labels), tally(logits, labels, batch=1)
    assert ones.confusion == whole.confusion
    assert ones.by_name() == pytest.approx(whole.by_name(), abs=1e-12)


def test_one_class_throughout_gives_no_division_by_zero() -> None:
    found = tally(torch.tensor([[3.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    assert (found.accuracy, found.macro_f1, found.matthews_correlation) == (1.0, 1.0, 0.0)


def test_a_very_wrong_answer_costs_a_large_but_finite_loss() -> None:
    found = tally(torch.tensor([[500.0, 0.0]]), torch.tensor([1]))
    assert found.loss == pytest.approx(500.0)


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(FloatingPointError):
        tally(torch.tensor([[float("nan"), 0.0]]), torch.tensor([1]))
