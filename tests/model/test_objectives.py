"""Losses are torch's, as sums; weighted means divide by the sum of the weights."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import LabelledBatch, pack
from bertsmith.model.objectives import BinaryCrossEntropy, CrossEntropy, Objective, SquaredError

LOGITS_NC = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES_N = torch.tensor([0, 1, 2, 1, 1, 0, 2])
SETS_NC = torch.randint(0, 2, (7, 3), generator=torch.Generator().manual_seed(1)).double()
WEIGHTS = (0.3, 2.0, 1.1)


def mean_of(objective: Objective, labels_N: Tensor, logits_NC: Tensor = LOGITS_NC) -> Tensor:
    """The loss as a step would divide it."""
    count = labels_N.numel()
    weights = objective.weights(labels_N)
    return objective.nats(logits_NC, labels_N) / (count if weights is None else weights.sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cross_entropy_is_that_of_torch(smoothing: float, weights: Any) -> None:
    weights_C = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = F.cross_entropy(LOGITS_NC, CLASSES_N, weight=weights_C, label_smoothing=smoothing)
    ours = CrossEntropy(class_weights_C=weights, label_smoothing=smoothing)
    logits_NC = LOGITS_NC.float()
    assert float(mean_of(ours, CLASSES_N, logits_NC)) == pytest.approx(float(expected), rel=1e-5)


def test_focal_loss_worked_by_hand() -> None:
    """p = 0.8: 0.2^2 * -ln 0.8; with a weight of 3 three times that."""
    logits_NC = torch.tensor([[math.log(0.8), math.log(0.2)]])
    expected = 0.2**2 * -math.log(0.8)
    focal = CrossEntropy(focal_gamma=2.0)
    assert float(focal.nats(logits_NC, torch.tensor([0]))) == pytest.approx(expected, rel=1e-5)
    weighted = CrossEntropy(focal_gamma=2.0, class_weights_C=(3.0, 1.0))
    assert float(weighted.nats(logits_NC, torch.tensor([0]))) == pytest.approx(3 * expected, 1e-5)
    binary = BinaryCrossEntropy(focal_gamma=2.0)
    logit = torch.tensor([[math.log(0.8 / 0.2)]])
    assert float(binary.nats(logit, torch.tensor([[1.0]]))) == pytest.approx(expected, rel=1e-5)
    absent = 0.8**2 * -math.log(0.2)
    assert float(binary.nats(logit, torch.tensor([[0.0]]))) == pytest.approx(absent, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_focal_gradient_is_finite_where_the_model_is_sure(gamma: float) -> None:
    for objective, labels in (
        (CrossEntropy(focal_gamma=gamma), torch.tensor([0])),
        (BinaryCrossEntropy(focal_gamma=gamma), torch.tensor([[1.0, 0.0]])),
    ):
        logits_NC = torch.tensor([[200.0, -200.0]], requires_grad=True)
        objective.nats(logits_NC, labels).backward()  # type: ignore[no-untyped-call]
        assert logits_NC.grad is not None
        assert bool(torch.isfinite(logits_NC.grad).all())


def test_several_labels_are_a_mean_over_all_pairs_of_text_and_label() -> None:
    expected = F.binary_cross_entropy_with_logits(LOGITS_NC, SETS_NC)
    assert float(mean_of(BinaryCrossEntropy(), SETS_NC)) == pytest.approx(float(expected))


def test_weights_of_several_labels_are_weights_of_terms() -> None:
    objective = BinaryCrossEntropy(present_weights_C=WEIGHTS, absent_weights_C=(1.0, 1.0, 1.0))
    summed = F.binary_cross_entropy_with_logits(
        LOGITS_NC, SETS_NC, pos_weight=torch.tensor(WEIGHTS, dtype=torch.float64), reduction="sum"
    )
    assert float(objective.nats(LOGITS_NC, SETS_NC)) == pytest.approx(float(summed))
    weights_NC = torch.where(SETS_NC > 0, torch.tensor(WEIGHTS, dtype=torch.float64), 1.0)
    found = objective.weights(SETS_NC)
    assert found is not None
    assert found.equal(weights_NC)


def test_smoothed_labels_move_towards_a_half() -> None:
    smooth_NC = SETS_NC * 0.8 + 0.1
    expected = F.binary_cross_entropy_with_logits(LOGITS_NC, smooth_NC)
    found = mean_of(BinaryCrossEntropy(label_smoothing=0.2), SETS_NC)
    assert float(found) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("objective", "labels_N", "num_outputs"),
    [
        (CrossEntropy(focal_gamma=1.0), torch.zeros(0, dtype=torch.int64), 3),
        (CrossEntropy(class_weights_C=WEIGHTS), torch.zeros(0, dtype=torch.int64), 3),
        (BinaryCrossEntropy(), torch.zeros(0, 3), 3),
        (SquaredError(), torch.zeros(0), 1),
    ],
)
def test_no_sequence_gives_a_loss_of_zero(
    objective: Objective, labels_N: Tensor, num_outputs: int
) -> None:
    logits_NC = torch.zeros(0, num_outputs, requires_grad=True)
    nats = objective.nats(logits_NC, labels_N)
    nats.backward()  # type: ignore[no-untyped-call]
    assert float(nats.detach()) == 0.0


def test_weights_follow_a_pack_through_its_cuts_and_fillers_have_none() -> None:
    weights_N = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64)
    batch = LabelledBatch(
        inputs=pack([torch.ones(n) for n in (3, 4, 2)]),
        labels_N=torch.tensor([0, 1, 2]),
        rows_N=torch.arange(3),
        weights_N=weights_N,
    )
    assert batch.target_counts == (6.5,)
    assert [part.target_counts[0] for part in batch.cut(7)] == [2.5, 4.0]
    assert batch.filler().target_counts == (0.0,)
    sets = LabelledBatch(inputs=batch.inputs, labels_N=torch.zeros(3, 5), rows_N=torch.arange(3))
    assert sets.target_counts == (15.0,)
    assert sets.filler().target_counts == (0.0,)
