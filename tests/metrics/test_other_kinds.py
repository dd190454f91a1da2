"""Scores of several labels, of numbers and of probabilities agree with scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics

from bertsmith.metrics.bootstrap import intervals
from bertsmith.metrics.calibration import best_temperature, calibration_error
from bertsmith.metrics.classification import classification_metrics
from bertsmith.metrics.multilabel import multilabel_metrics
from bertsmith.metrics.ranking import average_precision, roc_auc
from bertsmith.metrics.regression import mean_ranks, regression_metrics

SCORES = st.lists(st.integers(-3, 3), min_size=2, max_size=40)
"""Few values, so that there are ties."""


@given(scores=SCORES, seed=st.integers(0, 100))
def test_ranking_scores_are_those_of_sklearn_with_ties(scores: list[int], seed: int) -> None:
    is_so = np.random.default_rng(seed).integers(0, 2, len(scores))
    is_so[:2] = (0, 1)
    found = torch.tensor(scores, dtype=torch.float64)
    assert roc_auc(found, torch.from_numpy(is_so)) == pytest.approx(
        sklearn_metrics.roc_auc_score(is_so, scores)
    )
    assert average_precision(found, torch.from_numpy(is_so)) == pytest.approx(
        sklearn_metrics.average_precision_score(is_so, scores)
    )


def test_ranking_scores_of_one_class_alone_are_not_defined() -> None:
    scores = torch.tensor([0.1, 0.9])
    assert roc_auc(scores, torch.tensor([1, 1])) is None
    assert roc_auc(scores, torch.tensor([0, 0])) is None
    assert average_precision(scores, torch.tensor([0, 0])) is None
    assert average_precision(scores, torch.tensor([1, 1])) == 1.0


@given(values=st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=50))
def test_correlations_are_those_of_scipy_with_ties(values: list[tuple[int, int]]) -> None:
    values += [(-5, 0), (5, 1)]  # neither side is all the same
    predicted, true = (np.array(side, dtype=np.float64) for side in zip(*values, strict=True))
    found = regression_metrics(torch.from_numpy(predicted), torch.from_numpy(true))
    assert found.pearson == pytest.approx(stats.pearsonr(predicted, true)[0], abs=1e-9)
    assert found.spearman == pytest.approx(stats.spearmanr(predicted, true)[0], abs=1e-9)
    assert found.mse == pytest.approx(sklearn_metrics.mean_squared_error(true, predicted))
    assert found.mae == pytest.approx(sklearn_metrics.mean_absolute_error(true, predicted))


def test_ranks_worked_by_hand_and_no_spread_gives_zero() -> None:
    assert mean_ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [4, 1, 4, 2, 4]
    flat = regression_metrics(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
    assert (flat.pearson, flat.spearman) == (0.0, 0.0)
    assert flat.mse == pytest.approx(5 / 3)
    assert flat.mae == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_several_labels_are_those_of_sklearn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 2, (60, 5)) * rng.integers(0, 2, (60, 1))  # some rows without any label
    true[:, 4] = 0  # a label that never occurs
    logits = rng.normal(size=(60, 5)) + true
    thresholds = (0.5, 0.3, 0.7, 0.5, 0.5)
    chances = torch.from_numpy(logits).sigmoid()
    over = chances > torch.tensor(thresholds)
    found = multilabel_metrics(
        torch.from_numpy(logits),
        torch.from_numpy(true).float(),
        [f"l{i}" for i in range(5)],
        is_found_NC=over,
        thresholds_C=thresholds,
    )
    for average in ("macro", "micro", "samples", "weighted"):
        expected = sklearn_metrics.f1_score(true, over.numpy(), average=average, zero_division=0)
        assert getattr(found, f"{average}_f1") == pytest.approx(expected)
    assert found.exact_match == pytest.approx(sklearn_metrics.accuracy_score(true, over.numpy()))
    occur = range(4)
    assert found.average_precision == pytest.approx(
        sklearn_metrics.average_precision_score(true[:, occur], logits[:, occur])
    )
    assert found.roc_auc == pytest.approx(
        sklearn_metrics.roc_auc_score(true[:, occur], logits[:, occur])
    )
    assert (found.labels[4].roc_auc, found.labels[4].average_precision) == (None, None)
    assert found.loss == pytest.approx(
        np.mean(
            [sklearn_metrics.log_loss(true[:, c], chances[:, c], labels=[0, 1]) for c in range(5)]
        )
    )
    per_label = sklearn_metrics.precision_recall_fscore_support(true, over.numpy(), zero_division=0)
    ours = [(s.precision, s.recall, s.f1, s.support) for s in found.labels]
    np.testing.assert_allclose(ours, np.array(per_label).T)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_ranking_of_classes_is_that_of_sklearn(num_classes: int) -> None:
    rng = np.random.default_rng(num_classes)
    true = rng.integers(0, num_classes, 80)
    logits = torch.from_numpy(rng.normal(size=(80, num_classes)))
    logits[range(80), true] += 1.0
    found = classification_metrics(
        logits, torch.from_numpy(true), list(map(str, range(num_classes)))
    )
    chances = logits.softmax(1).numpy()
    by_class = chances[:, 1] if num_classes == 2 else chances
    assert found.roc_auc == pytest.approx(
        sklearn_metrics.roc_auc_score(true, by_class, multi_class="ovr")
    )
    assert found.average_precision == pytest.approx(
        sklearn_metrics.average_precision_score(true, by_class)
    )


def test_calibration_error_worked_by_hand() -> None:
    """Bins (14/15, 1] and (8/15, 9/15]: |0.95 - 0.5| for two of four, |0.55 - 1| for two."""
    chances_N = torch.tensor([0.95, 0.95, 0.55, 0.55])
    found = calibration_error(chances_N, torch.tensor([True, False, True, True]))
    assert found == pytest.approx((0.45 * 2 + 0.45 * 2) / 4)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0.0


def test_the_temperature_is_the_one_that_labels_were_drawn_with() -> None:
    """Labels drawn with probabilities of the logits divided by 2.5, and a grid search to agree."""
    torch.manual_seed(0)
    logits_NC = torch.randn(4000, 3, dtype=torch.float64) * 4
    labels_N = torch.multinomial((logits_NC / 2.5).softmax(1), 1)[:, 0]

    def nats_at(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits_NC / temperature, labels_N))

    found = best_temperature(nats_at)
    assert found == pytest.approx(2.5, rel=0.08)
    assert nats_at(found) <= min(nats_at(t) for t in np.linspace(0.5, 5, 200)) + 1e-12


def test_intervals_are_reproducible_and_hold_what_they_should() -> None:
    """The mean of 0/1 draws: the interval is that of the binomial, about 1.96 standard errors."""
    values = torch.tensor([1.0] * 60 + [0.0] * 40, dtype=torch.float64)

    def scores(rows: torch.Tensor) -> dict[str, float]:
        return {"mean": float(values[rows].mean())}

    found = intervals(scores, num_rows=100, num_samples=2000, seed=3)
    assert found == intervals(scores, num_rows=100, num_samples=2000, seed=3)
    assert found != intervals(scores, num_rows=100, num_samples=2000, seed=4)
    low, high = found["mean"]
    assert (low, high) == pytest.approx((0.6 - 1.96 * 0.049, 0.6 + 1.96 * 0.049), abs=0.015)
