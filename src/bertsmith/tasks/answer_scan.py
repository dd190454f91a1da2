"""The best span of each window, and of each question over its windows: exact, not out of an n-best.

Shape legend: T tokens of some windows end to end, R windows, R1 = R + 1, Q questions, L most
tokens of an answer.

Source:
    Devlin et al. 2019, section 4.2 and 4.3 (BERT on SQuAD): a span's score is the sum of its two
    ends' scores, that of no answer the sum of [CLS]'s, the least over the windows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCAN_COLUMNS = 5
"""Of `scan_windows`."""


def scan_windows(
    logits_T2: Tensor, starts_R1: Tensor, contexts_R: Tensor, *, max_answer_tokens: int
) -> Tensor:
    """What each window says, float64, shape R x 5.

    Columns: the best span's score (-inf in a window without context), its first and its last place
    in the window, the score of no answer, and the log of the summed exponentials of all its spans.

    Args:
        logits_T2: Scores of all tokens, on the CPU.
        starts_R1: Where windows start.
        contexts_R: Place in each window of its first token of the context; the last token is no
            context either.
        max_answer_tokens: A longer span is none.
    """
    logits_T2 = logits_T2.double()
    starts_R1 = starts_R1.long()
    lengths_R = starts_R1.diff()
    max_answer_tokens = min(max_answer_tokens, int(lengths_R.max()))  # none is longer
    owners_T = torch.arange(len(lengths_R)).repeat_interleave(lengths_R)
    places_T = torch.arange(len(owners_T)) - starts_R1[owners_T]
    is_context_T = (places_T >= contexts_R[owners_T]) & (places_T < lengths_R[owners_T] - 1)
    scores_T2 = logits_T2.masked_fill(~is_context_T[:, None], -torch.inf)
    more = (0, max_answer_tokens - 1)
    lasts_TL = F.pad(scores_T2[:, 1], more, value=-torch.inf).unfold(0, max_answer_tokens, 1)
    owners_TL = F.pad(owners_T, more, value=-1).unfold(0, max_answer_tokens, 1)
    spans_TL = scores_T2[:, :1] + lasts_TL.masked_fill(owners_TL != owners_T[:, None], -torch.inf)
    best_T, reach_T = spans_TL.max(1)
    best_R = _by_segment(best_T, owners_T, len(lengths_R), "amax")
    # Of spans with the same score the first.
    order_T = torch.where(best_T == best_R[owners_T], torch.arange(len(owners_T)), len(owners_T))
    first_R = _by_segment(order_T, owners_T, len(lengths_R), "amin")
    top_R = best_R.nan_to_num(neginf=0.0)
    sums_T = (spans_TL - top_R[owners_T, None]).exp().sum(1)
    total_R = _by_segment(sums_T, owners_T, len(lengths_R), "sum").log() + top_R
    places_R = first_R - starts_R1[:-1]
    null_R = logits_T2[starts_R1[:-1]].sum(1)
    return torch.stack([best_R, places_R, places_R + reach_T[first_R], null_R, total_R], 1)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the windows of each question say together, float64 and int64."""

    best_Q: Tensor
    """Score of the best span; -inf where the context has no token."""

    first_Q: Tensor
    """Its first token in the context."""

    last_Q: Tensor
    null_Q: Tensor
    """Score of no answer: the least over the windows."""

    total_Q: Tensor
    """Log of the summed exponentials of all spans of all windows."""

    @property
    def margin_Q(self) -> Tensor:
        """By how much no answer scores more than the best span."""
        return self.null_Q - self.best_Q


def merge_scans(scans_R5: Tensor, owners_R: Tensor, contexts_R: Tensor, pieces_R: Tensor) -> Found:
    """The best span over all windows of each question; of equal ones the first.

    Args:
        scans_R5: As `scan_windows` gives them.
        owners_R: The question of each window, ascending, every question at least once.
        contexts_R: Place in each window of its first token of the context.
        pieces_R: Which token of the context that is.
    """
    num = int(owners_R[-1]) + 1
    best_R, null_R, total_R = scans_R5[:, 0], scans_R5[:, 3], scans_R5[:, 4]
    best_Q = _by_segment(best_R, owners_R, num, "amax")
    order_R = torch.where(best_R == best_Q[owners_R], torch.arange(len(owners_R)), len(owners_R))
    window_Q = _by_segment(order_R, owners_R, num, "amin")
    shift_Q = (pieces_R - contexts_R)[window_Q]
    top_Q = best_Q.nan_to_num(neginf=0.0)
    sums_R = (total_R - top_Q[owners_R]).exp()
    return Found(
        best_Q=best_Q,
        first_Q=scans_R5[window_Q, 1].long() + shift_Q,
        last_Q=scans_R5[window_Q, 2].long() + shift_Q,
        null_Q=_by_segment(null_R, owners_R, num, "amin"),
        total_Q=_by_segment(sums_R, owners_R, num, "sum").log() + top_Q,
    )


def _by_segment(values_T: Tensor, owners_T: Tensor, num: int, reduce: str) -> Tensor:
    """Values reduced by owner; every owner has one."""
    fresh = torch.zeros(num, dtype=values_T.dtype)
    return fresh.scatter_reduce(0, owners_T, values_T, reduce, include_self=False)
