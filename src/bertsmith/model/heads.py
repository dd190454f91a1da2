"""What stands on the encoder: each head turns hidden states into logits and owns its loss.

A loss is a `LossSum`, never a mean: the step divides once, by the targets of every micro-batch
and rank, which is what keeps gradients right under accumulation (docs/decisions).

Shape legend: T packed tokens, N sequences, M masked positions, P pairs of segments, R rows that a
head reads, D width, V vocabulary, C classes.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import LabelledBatch, LossSum, MaskedBatch, PackedBatch
from bertsmith.model.chunked_loss import NO_TARGET, chunked_loss, row_slices
from bertsmith.model.config import EncoderConfig, HeadNorm, logits_rows
from bertsmith.model.dropout import apply_dropout, dropout_at
from bertsmith.model.encoder import Encoder, activate, with_repeats
from bertsmith.model.fused import masked_loss
from bertsmith.model.head_norm import BatchNorm, make_head_norm, normalized
from bertsmith.model.objectives import CrossEntropy, Objective

HEAD_SITE = 1_000_003
"""Dropout site of a head: beyond any block's."""


class MaskedLM(nn.Module):
    """An encoder that names hidden tokens; logits exist for masked positions only.

    The decoder's weight is the token embedding itself (tied), plus a bias of its own.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Allocate; `initialize` or a checkpoint gives values."""
        super().__init__()
        self.encoder = Encoder(config)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def logits_MV(
        self, batch: PackedBatch, positions_M: Tensor, *, dropout_seed: int | None
    ) -> Tensor:
        """Scores over the vocabulary at the given positions, ascending."""
        hidden_MD, table_VD = self._decoder_input(batch, positions_M, dropout_seed=dropout_seed)
        return F.linear(hidden_MD[: len(positions_M)], table_VD, self.bias)

    def _decoder_input(
        self, batch: PackedBatch, positions_M: Tensor, *, dropout_seed: int | None
    ) -> tuple[Tensor, Tensor]:
        """What meets the token table, and that table.

        As of `Encoder.with_table`, there may be some rows more than positions.
        """
        hidden_MD, table_VD = self.encoder.with_table(
            batch, dropout_seed=dropout_seed, rows_M=positions_M
        )
        return self._transformed(hidden_MD), table_VD

    def _transformed(self, hidden_MD: Tensor) -> Tensor:
        """What the decoder reads of hidden states."""
        transformed_MD: Tensor = self.norm(
            activate(self.transform(hidden_MD), self.encoder.config.hidden_act)
        )
        return transformed_MD

    def _nats(self, hidden_MD: Tensor, table_VD: Tensor, targets_M: Tensor) -> Tensor:
        """Cross-entropy of what the decoder reads, summed; rows beyond the targets have none."""
        num_more = len(hidden_MD) - len(targets_M)
        targets_M = F.pad(targets_M, (0, num_more), value=NO_TARGET)
        is_wide = len(targets_M) > logits_rows(table_VD.shape[0])
        loss = chunked_loss if is_wide else masked_loss
        nats = loss(hidden_MD, table_VD, self.bias, targets_M)
        if nats is None:
            logits_MV = F.linear(hidden_MD, table_VD, self.bias)
            nats = F.cross_entropy(
                logits_MV.float(), targets_M, ignore_index=NO_TARGET, reduction="sum"
            )
        return nats

    def forward(self, batch: MaskedBatch, *, dropout_seed: int | None) -> LossSum:
        """Cross-entropy at the masked positions, summed; 0 and no gradient if there are none."""
        hidden_MD, table_VD = self._decoder_input(
            batch.inputs, batch.positions_M, dropout_seed=dropout_seed
        )
        nats = self._nats(hidden_MD, table_VD, batch.targets_M)
        return LossSum(nats=nats, num_targets=batch.num_targets)

    @torch.no_grad()
    def nats_and_right_M(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Each target's cross-entropy without dropout, and whether it scores highest.

        Logits of a few rows exist at a time.
        """
        hidden_MD, table_VD = self._decoder_input(
            batch.inputs, batch.positions_M, dropout_seed=None
        )

        def of_rows(at: slice) -> tuple[Tensor, Tensor]:
            logits_RV = F.linear(hidden_MD[at], table_VD, self.bias).float()
            targets_R = batch.targets_M[at]
            nats_R = F.cross_entropy(logits_RV, targets_R, reduction="none")
            return nats_R, logits_RV.argmax(-1) == targets_R

        slices = row_slices(batch.num_targets, logits_rows(table_VD.shape[0]))
        nats, right = zip(*[of_rows(at) for at in slices], strict=True)
        return torch.cat(nats), torch.cat(right)


class PairedLM(MaskedLM):
    """A masked LM that also judges how the two segments of a sequence belong together.

    First token -> pooler (tanh) -> two scores: 0, the second segment follows the first in the text;
    1, it does not. BERT's next-sentence head, which ALBERT's sentence order uses as well.

    Source: Devlin et al. 2019, section 3.1; `transformers.BertForPreTraining`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Allocate; `initialize` or a checkpoint gives values."""
        super().__init__(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.relation = nn.Linear(config.hidden_size, 2)

    def forward(self, batch: MaskedBatch, *, dropout_seed: int | None) -> LossSum:
        """Two sums of cross-entropy: over the masked positions, and over the pairs; shape (2,)."""
        assert batch.pairs is not None, "a batch of pairs"
        firsts_P = batch.inputs.starts_N1[batch.pairs.sequences_P].long()
        rows_R = torch.cat([batch.positions_M, firsts_P]).sort().values
        hidden_RD, table_VD = self.encoder.with_table(
            batch.inputs, dropout_seed=dropout_seed, rows_M=rows_R
        )
        hidden_MD = hidden_RD[torch.searchsorted(rows_R, with_repeats(batch.positions_M))]
        first_PD = hidden_RD[torch.searchsorted(rows_R, firsts_P)]
        of_tokens = self._nats(self._transformed(hidden_MD), table_VD, batch.targets_M)
        logits_P2 = self._relation_P2(first_PD)
        of_pairs = F.cross_entropy(logits_P2.float(), batch.pairs.labels_P, reduction="sum")
        return LossSum(nats=torch.stack([of_tokens, of_pairs]), num_targets=batch.num_targets)

    @torch.no_grad()
    def pair_logits_P2(self, batch: MaskedBatch) -> Tensor:
        """Scores of the two labels for each pair, without dropout."""
        assert batch.pairs is not None, "a batch of pairs"
        firsts_P = batch.inputs.starts_N1[batch.pairs.sequences_P].long()
        return self._relation_P2(self.encoder(batch.inputs, dropout_seed=None, rows_M=firsts_P))

    def _relation_P2(self, first_PD: Tensor) -> Tensor:
        logits_P2: Tensor = self.relation(torch.tanh(self.pooler(first_PD)))
        return logits_P2


class SequenceClassifier(nn.Module):
    """BERT's classifier: first token -> pooler (tanh) -> dropout -> one score a class.

    Between pooler and dropout may stand a norm, which BERT has not: see `head_norm`. What the
    scores are to be is the objective's matter: classes, several labels, or a number.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        num_labels: int,
        norm: HeadNorm = "none",
        objective: Objective | None = None,
    ) -> None:
        """Allocate; `initialize` or a checkpoint gives values.

        Args:
            config: The encoder.
            num_labels: Scores of a sequence.
            norm: Of the head.
            objective: The loss; None: cross-entropy.
        """
        super().__init__()
        self.objective: Objective = objective or CrossEntropy()
        self.encoder = Encoder(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm_kind = norm
        self.head_norm = make_head_norm(
            norm, config.hidden_size, layer_norm_eps=config.layer_norm_eps
        )
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    @property
    def num_outputs(self) -> int:
        """Scores of a sequence."""
        return self.classifier.out_features

    def logits_NC(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """Scores for each sequence and class."""
        return self._first_logits_NC(batch, batch.num_sequences, dropout_seed=dropout_seed)

    def _first_logits_NC(
        self, batch: PackedBatch, num_sequences: int, *, dropout_seed: int | None
    ) -> Tensor:
        """Scores for the first so many sequences; the others stay out of a norm's statistics."""
        first_N = batch.starts_N1[:-1].long()
        first_ND = self.encoder(batch, dropout_seed=dropout_seed, rows_M=first_N)
        first_N, first_ND = first_N[:num_sequences], first_ND[:num_sequences]
        drop = dropout_at(
            drop_prob=self.encoder.config.hidden_dropout_prob,
            seed=dropout_seed,
            site=HEAD_SITE,
            first_row=batch.first_row,
        )
        pooled_ND = torch.tanh(in_fp32(self.pooler, first_ND))
        pooled_ND = normalized(self.head_norm, pooled_ND, is_training=dropout_seed is not None)
        return in_fp32(self.classifier, apply_dropout(pooled_ND, drop, first_N))

    def forward(self, batch: LabelledBatch, *, dropout_seed: int | None) -> LossSum:
        """The objective's loss over the sequences, summed.

        A filler, whose sequence is no target, gives a loss of 0 and gradients of 0, and takes its
        part in what ranks do together.
        """
        num_targets = batch.num_targets
        logits_NC = self._first_logits_NC(batch.inputs, num_targets, dropout_seed=dropout_seed)
        labels_N = batch.labels_N[:num_targets]
        nats = self.objective.nats(logits_NC.float(), labels_N)
        return LossSum(nats=nats, num_targets=num_targets)


def in_fp32(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """A product in fp32 at least, whatever its operands are stored in.

    In bf16 a score of 3 has steps of 1/64: texts would tie, and numbers be rounded.
    """
    dtype = torch.promote_types(linear.weight.dtype, torch.float32)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    with torch.autocast(inputs.device.type, enabled=False):
        return F.linear(inputs.to(dtype), linear.weight.to(dtype), bias)


def initialize(model: nn.Module, *, config: EncoderConfig, seed: int) -> None:
    """Give every parameter its published start, each from a generator keyed by its name.

    Weights are normal with `initializer_range`, biases and the padding row zero, LayerNorm
    one and zero (google-research/bert, modeling.py). Keyed by name, so that adding or loading
    a part never moves the others.
    """
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            module.reset()
            continue
        for key, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                if isinstance(module, nn.LayerNorm):
                    parameter.fill_(1.0 if key == "weight" else 0.0)
                elif parameter.ndim < 2:
                    parameter.zero_()
                else:
                    generator = torch.Generator().manual_seed(seed_of(f"{name}.{key}", seed))
                    parameter.copy_(
                        torch.empty(parameter.shape).normal_(
                            0.0, config.initializer_range, generator=generator
                        )
                    )
    for module in model.modules():
        if isinstance(module, Encoder):
            with torch.no_grad():
                module.embeddings.token.weight[config.pad_token_id].zero_()


def seed_of(name: str, seed: int) -> int:
    """A stable 63-bit seed for a named tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
