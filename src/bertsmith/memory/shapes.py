"""A run in numbers: all that its memory and its time depend on."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import EncoderConfig, HeadNorm, num_ghost_rows

Task = Literal["masked_lm", "classifier"]
NumberFormat = Literal["fp32", "bf16", "fp16"]
DeviceKind = Literal["cpu", "cuda"]
Body = Literal["kernels", "plain"]
Sharing = Literal["none", "dp", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA on a frozen encoder, as far as memory depends on it."""

    rank: int
    targets: tuple[str, ...]
    """Products of every block that have one, by `LORA_TARGETS`."""

    drops: bool = False
    """Whether their inputs have a dropout."""

    trains_pooler: bool = True
    """Whether the pooler is new, and trained with the classifier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """What one device of a run has to hold and to compute."""

    encoder: EncoderConfig

    task: Task

    tokens_per_pack: int
    """Most tokens of one forward and backward pass."""

    longest: int
    """Tokens of the longest sequence."""

    read_share: float
    """Of a pack's tokens, how many a head reads at most: the predicted ones, or one a sequence."""

    most_read: int | None = None
    """A bound on the tokens that a head reads; None: the share alone."""

    pair_share: float = 0.0
    """Of a pack's tokens, how many begin a pair of segments that a masked LM judges as well. 0: it
    judges none, and has no head for it."""

    evaluation_tokens: int | None = None
    """Tokens of a pack in evaluation; None: as in training."""

    num_labels: int = 2
    """Classes of a classifier."""

    head_norm: HeadNorm = "none"

    adapters: Adapters | None = None
    """None: the encoder itself is trained."""

    trained_rows: int | None = None
    """Rows of the token table that are trained, as `CompactVocabulary` picks them; None: all."""

    number_format: NumberFormat = "fp32"
    """Of matrix products."""

    device: DeviceKind = "cpu"

    body: Body = "kernels"
    """kernels: the C kernels of a CPU. plain: torch's own operations."""

    packs_per_step: int = 1
    """Passes of this device behind one update."""

    sharing: Sharing = "none"
    """How several devices share the run."""

    ranks: int = 1
    """Devices that share the run."""

    moment_bytes: int = 4
    """Of one number in a moment of the optimizer, 2 with `--optim.moments bf16`."""

    block_modes: tuple[BlockMode, ...] | None = None
    """What each block keeps for the backward pass; None: everything."""

    has_snapshot: bool = True
    """Whether the run saves while it trains: a CPU run then keeps a copy of model and moments."""

    threads: int = 1
    """Of the C kernels, each of which has a scratch area."""

    fixed_bytes: int | None = None
    """What the process takes beside tensors, where it is known; None: as other runs."""

    def with_tokens(self, tokens_per_pack: int) -> Self:
        """The same run in packs of another size; evaluation packs are never larger."""
        evaluation = self.evaluation_tokens
        return replace(
            self,
            tokens_per_pack=tokens_per_pack,
            longest=min(self.longest, tokens_per_pack),
            evaluation_tokens=None if evaluation is None else min(evaluation, tokens_per_pack),
        )

    def in_passes(self, max_tokens: int | None) -> Self:
        """The same run with its packs cut into passes of at most so many tokens; None: whole.

        The longest sequence is a pass of its own, whatever is asked for.
        """
        if max_tokens is None or max_tokens >= self.tokens_per_pack:
            return self
        tokens = max(max_tokens, self.longest)
        passes = self.packs_per_step * -(-self.tokens_per_pack // tokens)
        return replace(self.with_tokens(tokens), packs_per_step=passes)

    def num_read(self, tokens: int) -> int:
        """Tokens of a pack whose last hidden state the head reads, at most."""
        found = math.ceil(self.read_share * tokens) + math.ceil(self.pair_share * tokens)
        return max(found if self.most_read is None else min(found, self.most_read), 1)

    def rows_of_pass(self, tokens: int) -> tuple[int, int]:
        """Rows that are computed for so many tokens, and of these for the tokens that are read."""
        return self.computed_rows(tokens), self.computed_rows(self.num_read(tokens))

    def computed_rows(self, tokens: int) -> int:
        """Rows that are computed for so many: a CPU adds some."""
        return tokens + (num_ghost_rows(tokens) if self.device == "cpu" else 0)

    @property
    def modes(self) -> tuple[BlockMode, ...]:
        """What each block keeps."""
        kept: BlockMode = "none"
        return self.block_modes or (kept,) * self.encoder.num_hidden_layers

    @property
    def product_bytes(self) -> int:
        """Of one number in a matrix product."""
        return 4 if self.number_format == "fp32" else 2

    @property
    def table_rows(self) -> int:
        """Rows of the token table that are trained."""
        return self.encoder.vocab_size if self.trained_rows is None else self.trained_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How many numbers a model learns, by where they are."""

    table: int
    """Of the token table, the rows that are trained."""

    embeddings: int
    """Of the position and segment tables and their norm."""

    block: int
    """Of one block."""

    block_products: int
    """Of these, the weights of its matrix products."""

    num_blocks: int

    head: int

    head_products: int
    """Of these, the weights of its matrix products."""

    aside: int
    """Of the whole token table, kept beside the rows that are trained; 0 if all are."""

    frozen: int = 0
    """Weights that have no gradient: under adapters, which are then what is counted of a block."""

    @property
    def trained(self) -> int:
        """All that have a gradient and moments."""
        return self.table + self.embeddings + self.num_blocks * self.block + self.head


def parameters_of(shape: RunShape) -> Parameters:
    """Count the parameters of the model that a run trains."""
    whole = _whole_parameters(shape)
    if shape.adapters is None:
        return whole
    e, adapters = shape.encoder, shape.adapters
    width, inner = e.hidden_size, e.intermediate_size
    sides = {"inner": width + inner, "inner_out": width + inner}
    block = sum(adapters.rank * sides.get(target, 2 * width) for target in adapters.targets)
    pooler = 0 if adapters.trains_pooler else width * width + width
    rows = (e.vocab_size - shape.table_rows) * width
    return replace(
        whole,
        table=0,
        embeddings=0,
        block=block,
        head=whole.head - pooler,
        aside=0,
        frozen=whole.trained - whole.head + pooler + rows,
    )


def _whole_parameters(shape: RunShape) -> Parameters:
    """Of a model that is trained wholly."""
    e = shape.encoder
    width, inner = e.hidden_size, e.intermediate_size
    block_products = 4 * width * width + 2 * width * inner
    if shape.task == "masked_lm":
        head_products, head = width * width, width * width + 3 * width + e.vocab_size
        if shape.pair_share:  # a pooler and two scores
            head_products += width * width + 2 * width
            head += width * width + 3 * width + 2
    else:
        head_products = width * width + width * shape.num_labels
        head = head_products + width + shape.num_labels
        head += 0 if shape.head_norm == "none" else 2 * width
    return Parameters(
        table=shape.table_rows * width,
        embeddings=(e.max_position_embeddings + e.type_vocab_size + 2) * width,
        block=block_products + 9 * width + inner,
        block_products=block_products,
        num_blocks=e.num_hidden_layers,
        head=head,
        head_products=head_products,
        aside=0 if shape.trained_rows is None else e.vocab_size * width,
    )
