"""The best span of windows and of questions, against looking at every span by hand."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bertsmith.tasks.answer_scan import merge_scans, scan_windows

LONGEST_ANSWER = 7
"""More than lies between the contexts of two windows: no span may reach from one to the other."""


def windows(sizes: list[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, starts and first context tokens of windows with so many tokens before and in it."""
    lengths = torch.tensor([before + size + 1 for before, size in sizes])
    starts_R1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(seed)
    logits_T2 = torch.randn(int(starts_R1[-1]), 2, generator=generator) * 3
    return logits_T2, starts_R1, torch.tensor([before for before, _ in sizes])


def by_hand(logits_T2: Tensor, start: int, before: int, size: int) -> dict[tuple[int, int], float]:
    """The score of every span of a window."""
    return {
        (i, j): float(logits_T2[start + i, 0].double() + logits_T2[start + j, 1].double())
        for i in range(before, before + size)
        for j in range(i, min(i + LONGEST_ANSWER, before + size))
    }


@given(
    sizes=st.lists(st.tuples(st.integers(3, 5), st.integers(0, 9)), min_size=1, max_size=5),
    seed=st.integers(0, 50),
)
def test_each_window_gives_its_best_span_and_the_sum_over_all(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    logits_T2, starts_R1, contexts_R = windows(sizes, seed)
    scans = scan_windows(logits_T2, starts_R1, contexts_R, max_answer_tokens=LONGEST_ANSWER)
    for scan, start, (before, size) in zip(scans.tolist(), starts_R1.tolist(), sizes, strict=False):
        spans = by_hand(logits_T2, start, before, size)
        best, first, last, null, total = scan
        assert math.isclose(null, float(logits_T2[start].double().sum()), rel_tol=1e-9)
        if not spans:
            assert best == total == -math.inf
            continue
        assert (first, last) == max(spans, key=lambda span: spans[span])
        assert math.isclose(best, max(spans.values()), rel_tol=1e-9)
        logs = torch.tensor(list(spans.values()), dtype=torch.float64).logsumexp(0)
        assert math.isclose(total, float(logs), rel_tol=1e-9)


def test_a_question_takes_the_best_of_its_windows_as_tokens_of_its_context() -> None:
    # Two questions: one in two windows that begin at tokens 0 and 4 of its context, one in one.
    scans_R5 = torch.tensor(
        [
            [2.0, 5.0, 6.0, 1.5, 3.0],
            [4.0, 3.0, 3.0, -0.5, 4.5],
            [-1.0, 7.0, 8.0, 0.0, 0.0],
        ],
        dtype=torch.float64,
    )
    found = merge_scans(
        scans_R5,
        torch.tensor([0, 0, 1]),
        contexts_R=torch.tensor([3, 3, 6]),
        pieces_R=torch.tensor([0, 4, 0]),
    )
    assert found.best_Q.tolist() == [4.0, -1.0]
    assert found.first_Q.tolist() == [3 - 3 + 4, 1]
    assert found.last_Q.tolist() == [4, 2]
    assert found.null_Q.tolist() == [-0.5, 0.0]
    assert found.margin_Q.tolist() == [-4.5, 1.0]
    expected = torch.tensor([[3.0, 4.5], [0.0, -math.inf]], dtype=torch.float64).logsumexp(1)
    torch.testing.assert_close(found.total_Q, expected)


def test_of_equal_windows_the_first_is_taken() -> None:
    scans_R5 = torch.tensor([[1.0, 4.0, 4.0, 0.0, 1.0], [1.0, 3.0, 3.0, 0.0, 1.0]]).double()
    found = merge_scans(scans_R5, torch.tensor([0, 0]), torch.tensor([3, 3]), torch.tensor([0, 2]))
    assert (found.first_Q.tolist(), found.last_Q.tolist()) == ([1], [1])
