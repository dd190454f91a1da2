"""A sentence embedder: the encoder, and one vector a text made of its hidden states.

Shape legend: T packed tokens, N sequences, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import LossSum, PackedBatch, SentenceBatch
from bertsmith.model.config import Pooling
from bertsmith.model.encoder import Encoder
from bertsmith.model.pair_objectives import PairObjective


class SentenceEmbedder(nn.Module):
    """Hidden states -> their mean over a text's own tokens, or the first one -> length 1.

    Source: Reimers and Gurevych 2019.
    """

    def __init__(
        self, encoder: Encoder, *, pooling: Pooling, objective: PairObjective | None = None
    ) -> None:
        """Nothing is added to the encoder's parameters.

        Args:
            encoder: With its values.
            pooling: mean or cls.
            objective: The loss; None: for inference.
        """
        super().__init__()
        self.encoder = encoder
        self.pooling: Pooling = pooling
        self.objective = objective

    @property
    def num_outputs(self) -> int:
        """Numbers of a text."""
        return self.encoder.config.hidden_size

    def logits_NC(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """Embeddings of a pack's texts, of length 1, fp32: what this head gives for scores."""
        return self._embedded_ND(batch, dropout_seed=dropout_seed)

    def _embedded_ND(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        if self.pooling == "cls":
            first_N = batch.starts_N1[:-1].long()
            pooled_ND = self.encoder(batch, dropout_seed=dropout_seed, rows_M=first_N).float()
        else:
            hidden_TD = self.encoder(batch, dropout_seed=dropout_seed).float()
            pooled_ND = torch.segment_reduce(  # an index_add would add up in any order on a GPU
                hidden_TD, "mean", lengths=batch.starts_N1.long().diff(), axis=0, unsafe=True
            )
        return F.normalize(pooled_ND, dim=1)

    def forward(self, batch: SentenceBatch, *, dropout_seed: int | None) -> LossSum:
        """The loss's share that belongs to these texts, with the gradient that is known already.

        Its value is what the whole step's loss said of them; its gradient that of the embeddings,
        led on into the parameters (Gao et al. 2021).
        """
        assert batch.gradients_ND is not None, "a step seen whole"
        assert batch.losses_N is not None, "a step seen whole"
        embeddings_ND = self._embedded_ND(batch.inputs, dropout_seed=dropout_seed)
        along = (embeddings_ND[: batch.num_targets] * batch.gradients_ND).sum()
        nats = batch.losses_N.sum() + (along - along.detach())
        return LossSum(nats=nats, num_targets=batch.num_targets)
