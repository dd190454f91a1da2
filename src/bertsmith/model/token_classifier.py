"""BERT's classifier of words: the hidden state of a word's first piece -> dropout -> a score a tag.

Shape legend: T packed tokens, M words, D width, C tags.
"""

import torch
from torch import Tensor, nn

from bertsmith.batch import LossSum, MaskedBatch, PackedBatch
from bertsmith.model.config import EncoderConfig
from bertsmith.model.dropout import apply_dropout, dropout_at
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HEAD_SITE, in_fp32
from bertsmith.model.objectives import CrossEntropy


class TokenClassifier(nn.Module):
    """An encoder that tags words; scores exist at their first pieces only.

    Source: Devlin et al. 2019, section 5.3; `transformers.BertForTokenClassification`.
    """

    def __init__(
        self, config: EncoderConfig, *, num_labels: int, objective: CrossEntropy | None = None
    ) -> None:
        """Allocate; `initialize` or a checkpoint gives values.

        Args:
            config: The encoder.
            num_labels: Tags.
            objective: The loss; None: cross-entropy, all tags alike.
        """
        super().__init__()
        self.objective = objective or CrossEntropy()
        self.encoder = Encoder(config)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def logits_MC(
        self, batch: PackedBatch, positions_M: Tensor, *, dropout_seed: int | None
    ) -> Tensor:
        """Scores of the tags at the given positions, ascending."""
        return self._logits_MC(batch, positions_M, dropout_seed=dropout_seed)

    def _logits_MC(
        self, batch: PackedBatch, positions_M: Tensor, *, dropout_seed: int | None
    ) -> Tensor:
        hidden_MD = self.encoder(batch, dropout_seed=dropout_seed, rows_M=positions_M)
        drop = dropout_at(
            drop_prob=self.encoder.config.hidden_dropout_prob,
            seed=dropout_seed,
            site=HEAD_SITE,
            first_row=batch.first_row,
        )
        hidden_MD = hidden_MD[: len(positions_M)]
        if dropout_seed is None:
            return in_fp32(self.classifier, hidden_MD)
        logits_MC: Tensor = self.classifier(apply_dropout(hidden_MD, drop, positions_M))
        return logits_MC

    def forward(self, batch: MaskedBatch, *, dropout_seed: int | None) -> LossSum:
        """The objective's loss over the words, summed; 0 and no gradient if there are none."""
        logits_MC = self._logits_MC(batch.inputs, batch.positions_M, dropout_seed=dropout_seed)
        nats = self.objective.nats(logits_MC.float(), batch.targets_M)
        return LossSum(nats=nats, num_targets=batch.num_targets)

    @torch.no_grad()
    def scores_MC(self, batch: PackedBatch, positions_M: Tensor) -> Tensor:
        """Scores without dropout, fp32."""
        return self.logits_MC(batch, positions_M, dropout_seed=None).float()
