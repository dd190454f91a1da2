"""The shape of an encoder and of its heads.

Imports neither torch nor numpy, so that help and checks are instant.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

Activation = Literal["gelu", "gelu_new", "relu"]
HeadNorm = Literal["none", "batch", "layer"]
Pooling = Literal["mean", "cls"]

LOGITS_BYTES = 128 << 20
"""Most bytes of fp32 logits over the vocabulary at a time: 1,099 rows of BERT's 30,522."""


def logits_rows(vocab_size: int) -> int:
    """Rows of logits that a decoder makes at a time; `model.chunked_loss` takes it for more."""
    return max(LOGITS_BYTES // (4 * vocab_size), 1)


GHOST_SHARE = 64
"""Rows that are computed for nobody are at most one in so many, or 15."""


def num_ghost_rows(rows: int) -> int:
    """Rows that a CPU adds to so many, so that products of few sizes are ever compiled."""
    size = max(16, 1 << (max(rows // GHOST_SHARE, 1).bit_length() - 1))
    return -rows % size


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """A BERT encoder as published (Devlin et al. 2019), in Hugging Face's words."""

    vocab_size: int = 30522
    """Rows of the token embedding."""

    hidden_size: int = 768
    """Width of the residual stream."""

    num_hidden_layers: int = 12
    """Transformer blocks."""

    num_attention_heads: int = 12
    """Attention heads; must divide hidden_size."""

    intermediate_size: int = 3072
    """Width inside the feed-forward half of a block."""

    max_position_embeddings: int = 512
    """Learned positions: the longest sequence the model can read, special tokens included."""

    type_vocab_size: int = 2
    """Token types (segments)."""

    hidden_act: Activation = "gelu"
    """Activation inside the feed-forward half; gelu is the exact one (erf)."""

    hidden_dropout_prob: float = 0.1
    """Dropout on embeddings and on what each half of a block adds to the residual stream."""

    attention_probs_dropout_prob: float = 0.1
    """Dropout on attention probabilities."""

    layer_norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""

    initializer_range: float = 0.02
    """Standard deviation of new weights."""

    pad_token_id: int = 0
    """Id of the padding token: its embedding row starts at zero, as in Hugging Face's BERT."""

    def __post_init__(self) -> None:
        """Reject shapes no model can have."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}; choose heads that divide the width"
            )
        if not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}; it must be one of the {self.vocab_size} ids"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a classifier puts on the encoder besides its linear layer."""

    norm: HeadNorm = "none"
    """Normalisation of the pooled vector, before the classifier. batch: over the sequences of one
    pack; the saved model holds it folded into the classifier. layer: over the features; the saved
    model is read by bertsmith alone, not by transformers."""

    def __post_init__(self) -> None:
        """Reject a norm there is not."""
        if self.norm not in get_args(HeadNorm):
            raise ValueError(
                f"norm is {self.norm!r}; it must be one of {', '.join(get_args(HeadNorm))}"
            )


LORA_TARGETS = ("query", "key", "value", "attention_out", "inner", "inner_out")
"""Products of a block that an adapter can be added to."""

LORA_DEFAULT_TARGETS = ("query", "value")
"""As in the paper's experiments, and in peft for BERT."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train small additions to a frozen encoder instead of its weights (Hu et al. 2021, LoRA)."""

    rank: int = 0
    """Inner width of each adapter: W x becomes W x + alpha / rank * B A x, and of the encoder only
    A and B are trained. 0: no adapters, all weights are trained."""

    alpha: float | None = None
    """Scale of what adapters add, times rank. None: twice the rank, so that the scale is 2 at any
    rank and a learning rate that suits one suits the next."""

    dropout: float = 0.0
    """Chance that an element of an adapter's input is dropped."""

    targets: list[str] = field(default_factory=lambda: list(LORA_DEFAULT_TARGETS))
    """Products that get one, in every block: query, key, value, attention_out, inner,
    inner_out."""

    def __post_init__(self) -> None:
        """Reject what no adapter can be."""
        if self.rank < 0:
            raise ValueError(f"rank is {self.rank}; it must be at least 1, or 0 for no adapters")
        if self.alpha is not None and not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha is {self.alpha}; it must be over 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        unknown = [name for name in self.targets if name not in LORA_TARGETS]
        if unknown or not self.targets:
            what = f"names {unknown[0]!r}" if unknown else "is empty"
            raise ValueError(f"targets {what}; give some of {', '.join(LORA_TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names one twice: {', '.join(self.targets)}")
        is_untouched = self.alpha is None and self.dropout == 0.0
        if not self.is_on and not (is_untouched and self.targets == list(LORA_DEFAULT_TARGETS)):
            raise ValueError(
                "rank is 0, so there are no adapters for the other lora settings; give lora.rank, "
                "such as 8"
            )

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What an adapter's product is multiplied with."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


def _preset(layers: int, width: int, heads: int) -> EncoderConfig:
    return EncoderConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


PRESETS: dict[str, EncoderConfig] = {
    "bert-tiny": _preset(2, 128, 2),
    "bert-mini": _preset(4, 256, 4),
    "bert-small": _preset(4, 512, 8),
    "bert-medium": _preset(8, 512, 8),
    "bert-base": _preset(12, 768, 12),
    "bert-large": _preset(24, 1024, 16),
}
"""Google's published sizes (google-research/bert, README); the vocabulary is the tokenizer's."""
