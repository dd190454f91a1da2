"""The windows of a text give one answer; a text of one window keeps its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bertsmith.tasks.classification import Classification
from bertsmith.tasks.kind import TaskKind
from bertsmith.tasks.multilabel import Multilabel
from bertsmith.tasks.regression import Regression
from bertsmith.tasks.windows import Merge

OWNERS_W = torch.tensor([0, 1, 1, 1, 2])


def logits_of_windows(num_labels: int) -> torch.Tensor:
    return torch.randn(5, num_labels, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("kind", [Classification(), Multilabel(), Regression()])
@pytest.mark.parametrize("merge", ["mean", "max"])
def test_a_text_of_one_window_keeps_its_scores_to_the_bit(
    kind: TaskKind[Any], merge: Merge
) -> None:
    logits_WC = logits_of_windows(3)
    merged_NC = kind.merged(logits_WC, OWNERS_W, merge=merge)
    assert merged_NC.dtype == torch.float32
    assert torch.equal(merged_NC[[0, 2]], logits_WC[[0, 4]])
    alone_N = torch.arange(5)
    assert torch.equal(kind.merged(logits_WC, alone_N, merge=merge), logits_WC)


def test_classes_have_the_mean_of_their_probabilities_or_the_largest_scaled_to_one() -> None:
    logits_WC = logits_of_windows(3)
    chances_WC = logits_WC[1:4].softmax(1)
    mean_C = Classification().merged(logits_WC, OWNERS_W, merge="mean")[1].softmax(0)
    assert torch.allclose(mean_C, chances_WC.mean(0), atol=1e-6)
    max_C = Classification().merged(logits_WC, OWNERS_W, merge="max")[1].softmax(0)
    largest_C = chances_WC.max(0).values
    assert torch.allclose(max_C, largest_C / largest_C.sum(), atol=1e-6)


def test_labels_of_several_and_numbers_are_merged_each_by_itself() -> None:
    logits_WC = logits_of_windows(2)
    reductions: dict[Merge, Callable[..., torch.Tensor]] = {"mean": torch.mean, "max": torch.amax}
    for merge, reduce in reductions.items():
        found_C = Multilabel().merged(logits_WC, OWNERS_W, merge=merge)[1].sigmoid()
        assert torch.allclose(found_C, reduce(logits_WC[1:4].sigmoid(), 0), atol=1e-6)
        number_C = Regression().merged(logits_WC[:, :1], OWNERS_W, merge=merge)[1]
        assert torch.allclose(number_C, reduce(logits_WC[1:4, :1], 0), atol=1e-6)


def test_a_probability_of_1_stays_finite() -> None:
    logits_WC = torch.tensor([[200.0, -200.0], [200.0, -200.0]])
    owners_W = torch.tensor([0, 0])
    for kind in (Classification(), Multilabel()):
        merged_NC = kind.merged(logits_WC, owners_W, merge="mean")
        assert bool(torch.isfinite(merged_NC).all())
        assert float(merged_NC[0, 0]) > float(merged_NC[0, 1]) + 30.0


def test_what_is_not_finite_stays_so_and_is_found() -> None:
    logits_WC = torch.tensor([[float("nan"), 0.0], [1.0, 0.0]])
    merged_NC = Classification().merged(logits_WC, torch.tensor([0, 0]), merge="mean")
    assert not bool(torch.isfinite(merged_NC).all())
