"""BERT as published (Devlin et al. 2019): post-LayerNorm blocks over packed tokens.

Shape legend: T packed tokens, D width, F inner width, H heads, K head width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import PackedBatch
from bertsmith.model.attention import attention
from bertsmith.model.config import Activation, EncoderConfig
from bertsmith.model.dropout import dropout, dropout_at

SITES_PER_BLOCK = 3
"""Independent dropouts in a block: attention probabilities, attention output, feed-forward."""


class Encoder(nn.Module):
    """Token ids to one vector a token.

    Dropout is asked for by the `dropout_seed` argument alone: None means inference, whatever
    `training` says, and the same seed gives the same masks.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Allocate the parameters; `initialize` or a checkpoint gives them values."""
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(
            Block(config, first_site=1 + SITES_PER_BLOCK * i)
            for i in range(config.num_hidden_layers)
        )

    def forward(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """Hidden states after the last block, shape (T, D)."""
        hidden_TD = self.embeddings(batch, dropout_seed=dropout_seed)
        for block in self.blocks:
            hidden_TD = block(hidden_TD, batch, dropout_seed=dropout_seed)
        return hidden_TD


class Embeddings(nn.Module):
    """Sum of token, position and segment vectors, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        """Three tables and a LayerNorm."""
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """Vectors for each token, shape (T, D)."""
        hidden_TD = (
            self.token(batch.input_ids_T)
            + self.position(batch.position_ids_T)
            + self.segment(batch.segment_ids_T)
        )
        return dropout(
            self.norm(hidden_TD),
            drop_prob=self.config.hidden_dropout_prob,
            seed=dropout_seed,
            site=0,
        )


class Block(nn.Module):
    """Self-attention and a feed-forward half, each added to its input and normalised."""

    def __init__(self, config: EncoderConfig, *, first_site: int) -> None:
        """Parameters of one block; `first_site` numbers its dropouts within the model."""
        super().__init__()
        self.config = config
        self.first_site = first_site
        width, inner = config.hidden_size, config.intermediate_size
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.inner = nn.Linear(width, inner)
        self.inner_out = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, *, dropout_seed: int | None) -> Tensor:
        """One block, shape (T, D) to (T, D)."""
        config, site = self.config, self.first_site
        context_TD = attention(
            self.qkv(hidden_TD),
            batch.starts_N1,
            longest=batch.longest,
            heads=config.num_attention_heads,
            drop=dropout_at(
                drop_prob=config.attention_probs_dropout_prob, seed=dropout_seed, site=site
            ),
        )
        added_TD = dropout(
            self.attention_out(context_TD),
            drop_prob=config.hidden_dropout_prob,
            seed=dropout_seed,
            site=site + 1,
        )
        hidden_TD = self.attention_norm(hidden_TD + added_TD)
        inner_TF = activate(self.inner(hidden_TD), config.hidden_act)
        added_TD = dropout(
            self.inner_out(inner_TF),
            drop_prob=config.hidden_dropout_prob,
            seed=dropout_seed,
            site=site + 2,
        )
        return self.output_norm(hidden_TD + added_TD)


def activate(values: Tensor, activation: Activation) -> Tensor:
    """The config's activation: gelu is exact (erf), gelu_new its tanh approximation."""
    match activation:
        case "gelu":
            return F.gelu(values)
        case "gelu_new":
            return F.gelu(values, approximate="tanh")
        case "relu":
            return F.relu(values)
