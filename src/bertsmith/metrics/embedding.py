"""How well embeddings find what belongs together, over a whole table.

Shape legend: N rows, C different second texts, S texts, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.metrics.score_table import ScoreTable

ROWS_AT_ONCE = 1024
"""Anchors whose scores exist at a time."""

DEPTHS = (1, 5, 10)
"""How far down a list `recall` looks."""


@dataclass(frozen=True, kw_only=True)
class RetrievalMetrics:
    """Each row's second text looked up among all different second texts of the table."""

    num_examples: int
    mean_reciprocal_rank: float
    """1 over the place of the best of a text's right answers; 1: always the first."""

    recall: Mapping[int, float]
    """Share of rows with a right answer among the first so many."""

    loss: float
    """The training loss, all rows as one step."""

    def by_name(self) -> dict[str, float]:
        """The scores by their names."""
        return {
            "mean_reciprocal_rank": self.mean_reciprocal_rank,
            **{f"recall_at_{depth}": share for depth, share in self.recall.items()},
            "loss": self.loss,
        }

    def details(self) -> Mapping[str, object]:
        """Nothing besides."""
        return {}

    def tables(self) -> Sequence[ScoreTable]:
        """Nothing besides."""
        return ()


def retrieval_metrics(
    anchors_ND: Tensor, seconds_ND: Tensor, ids_N2: Tensor, *, scale: float
) -> RetrievalMetrics:
    """Ranks and loss; a tie counts against the right answer.

    All second texts of rows with the same anchor are right for it. Of several right ones the best
    counts for the ranks, as it does for a user; the loss is of each row's own.

    Args:
        anchors_ND: Embeddings of the first texts, of length 1.
        seconds_ND: Of the second texts.
        ids_N2: Number of each first and second text, the same for equal texts.
        scale: What the loss multiplies cosines by.
    """
    num_rows = len(anchors_ND)
    candidates, of_row_N = torch.unique(ids_N2[:, 1], return_inverse=True)
    firsts_C = torch.full((len(candidates),), num_rows).scatter_reduce(
        0, of_row_N, torch.arange(num_rows), "amin"
    )
    table_CD = seconds_ND[firsts_C].double()
    row_order_N = torch.argsort(ids_N2[:, 0], stable=True)
    sorted_ids_N = ids_N2[row_order_N, 0].contiguous()
    places: list[Tensor] = []
    nats: list[Tensor] = []
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows_R = torch.arange(start, min(start + ROWS_AT_ONCE, num_rows))
        cosines_RC = anchors_ND[rows_R].double() @ table_CD.T
        is_right_RC = torch.zeros_like(cosines_RC, dtype=torch.bool)
        ids_R = ids_N2[rows_R, 0].contiguous()
        low_R = torch.searchsorted(sorted_ids_N, ids_R)
        high_R = torch.searchsorted(sorted_ids_N, ids_R, right=True)
        for i, (low, high) in enumerate(zip(low_R.tolist(), high_R.tolist(), strict=True)):
            is_right_RC[i, of_row_N[row_order_N[low:high]]] = True
        best_R1 = cosines_RC.masked_fill(~is_right_RC, -torch.inf).amax(1, keepdim=True)
        places.append(1 + ((cosines_RC >= best_R1) & ~is_right_RC).sum(1))
        own_R1 = of_row_N[rows_R][:, None]
        own_cosine_R1 = cosines_RC.gather(1, own_R1)
        # Neither another right answer nor the anchor itself is a negative.
        is_out_RC = is_right_RC | (candidates[None] == ids_R[:, None])
        others_RC = cosines_RC.masked_fill(is_out_RC.scatter(1, own_R1, True), -torch.inf)
        scores = scale * torch.cat([own_cosine_R1, others_RC], 1)
        nats.append(torch.logsumexp(scores, 1) - scores[:, 0])
    place_N = torch.cat(places)
    return RetrievalMetrics(
        num_examples=num_rows,
        mean_reciprocal_rank=float((1.0 / place_N.double()).mean()),
        recall={depth: float((place_N <= depth).double().mean()) for depth in DEPTHS},
        loss=float(torch.cat(nats).mean()),
    )
