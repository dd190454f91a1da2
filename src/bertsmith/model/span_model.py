"""BERT's reader of answers: a score of every token to be an answer's first, and its last.

Shape legend: T packed tokens, N sequences, N2 the same with two columns (first and last token), D
width.
"""

import torch
from torch import Tensor, nn

from bertsmith.batch import LabelledBatch, LossSum, PackedBatch
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import in_fp32

NUM_ENDS = 2
"""Columns of the scores: the answer's first token, and its last."""


class SpanModel(nn.Module):
    """An encoder that scores where an answer begins and where it ends.

    Source: Devlin et al. 2019, section 4.2; `transformers.BertForQuestionAnswering`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Allocate; `initialize` or a checkpoint gives values."""
        super().__init__()
        self.encoder = Encoder(config)
        self.span_scores = nn.Linear(config.hidden_size, NUM_ENDS)

    def logits_T2(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """Scores of all tokens, question and special ones included."""
        return self._logits_T2(batch, dropout_seed=dropout_seed)

    def _logits_T2(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        hidden_TD = self.encoder(batch, dropout_seed=dropout_seed)
        if dropout_seed is None:
            return in_fp32(self.span_scores, hidden_TD)
        logits_T2: Tensor = self.span_scores(hidden_TD)
        return logits_T2

    def forward(self, batch: LabelledBatch, *, dropout_seed: int | None) -> LossSum:
        """Cross-entropy of first and last token among all of a sequence's, summed over both.

        `labels_N` are places in their sequence, int64, shape N x 2; 0, the first token, says that
        the sequence has no answer. A filler, whose sequence is no target, gives a loss of 0 and
        gradients of 0.
        """
        logits_T2 = self._logits_T2(batch.inputs, dropout_seed=dropout_seed).float()
        nats_N2 = span_nats(logits_T2, batch.inputs.starts_N1, batch.labels_N)
        return LossSum(nats=nats_N2[: batch.num_targets].sum(), num_targets=batch.num_targets)


def span_nats(logits_T2: Tensor, starts_N1: Tensor, places_N2: Tensor) -> Tensor:
    """Cross-entropy of each sequence's two places among its own tokens, fp32, shape N x 2.

    Args:
        logits_T2: Scores of all tokens, fp32.
        starts_N1: Where sequences start.
        places_N2: Places in their sequence, int64.
    """
    starts = starts_N1.long()
    lengths_N = starts.diff()
    # A segment's sum is the same in any run; an index_add would add up in any order on a GPU.
    most_N2 = torch.segment_reduce(
        logits_T2.detach(), "max", lengths=lengths_N, axis=0, unsafe=True
    )
    below_T2 = logits_T2 - most_N2.repeat_interleave(lengths_N, dim=0)
    sums_N2 = torch.segment_reduce(below_T2.exp(), "sum", lengths=lengths_N, axis=0, unsafe=True)
    there_N2 = below_T2.gather(0, starts[:-1, None] + places_N2)
    return sums_N2.log() - there_N2
