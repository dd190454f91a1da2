"""What the walks through a training step share: its order, and gradients as they come.

Shape legend: T rows of a pack as computed, M of them that a head reads, D width, F inner width,
V rows of the token table, H heads. `b` is the size of a number in matrix products.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from bertsmith.memory.ledger import Ledger
from bertsmith.memory.shapes import RunShape, parameters_of
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import logits_rows

FP32 = 4
IDS = 3 * 8
"""Bytes a token of a pack's token, position and segment ids."""


class Walk(ABC):
    """One pass, forward and backward, told to a ledger; the two kinds of body refine it."""

    def __init__(self, shape: RunShape, ledger: Ledger, *, accumulates: bool) -> None:
        """Nothing is told yet.

        Args:
            shape: The run.
            ledger: Has the states in its books.
            accumulates: Whether every parameter has a gradient from the pass before, to which this
                one's is added.
        """
        self.shape, self.ledger, self.accumulates = shape, ledger, accumulates
        self.counts = parameters_of(shape)
        encoder = shape.encoder
        self.D, self.F = encoder.hidden_size, encoder.intermediate_size
        self.H, self.V = encoder.num_attention_heads, shape.table_rows
        self.b = shape.product_bytes
        self.drops = encoder.hidden_dropout_prob > 0.0
        self.drops_probs = encoder.attention_probs_dropout_prob > 0.0

    def train(self) -> None:
        """A forward and a backward pass over the largest pack."""
        tokens = self.shape.tokens_per_pack
        T, M = self.shape.rows_of_pass(tokens)
        modes = self.shape.modes
        last = len(modes) - 1
        with self.ledger.within("pack", "activations", self.pack_bytes(tokens, T, M)):
            self.embed(T)
            for i, mode in enumerate(modes):
                self.block_forward(i, mode, T, M if i == last else T)
            self.head_forward(M)
            self.head_backward(M)
            for i, mode in reversed(list(enumerate(modes))):
                self.block_backward(i, mode, T, M if i == last else T)
            self.embed_backward(T)

    def evaluate(self) -> None:
        """A forward pass without gradients."""
        tokens = self.shape.evaluation_tokens or self.shape.tokens_per_pack
        T, M = self.shape.rows_of_pass(tokens)
        num_blocks = len(self.shape.modes)
        with self.ledger.within("pack", "activations", self.pack_bytes(tokens, T, M)):
            for i in range(num_blocks):
                self.block_inference(T, M if i == num_blocks - 1 else T)
            self.head_inference(M)

    def pack_bytes(self, tokens: int, T: int, M: int) -> int:
        """Ids of a pack, and what is asked of it.

        On a CPU once more, with the rows that are added: the pack that just needs none is not the
        worst, since one with a token less does.
        """
        return IDS * (tokens + (T if self.shape.device == "cpu" else 0)) + 16 * M

    @abstractmethod
    def embed(self, T: int) -> None:
        """Hold what the embeddings leave: `hidden 0` is the first block's input."""

    @abstractmethod
    def block_forward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Hold what block i leaves for its backward, and its output, `hidden i + 1`."""

    @abstractmethod
    def head_forward(self, M: int) -> None:
        """Hold what the head leaves."""

    @abstractmethod
    def head_backward(self, M: int) -> None:
        """Leave `d hidden` of the encoder's output."""

    @abstractmethod
    def block_backward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Spend what block i left, and leave `d hidden` of its input."""

    @abstractmethod
    def embed_backward(self, T: int) -> None:
        """Spend `d hidden`."""

    @abstractmethod
    def block_inference(self, T: int, M: int) -> None:
        """A block without gradients."""

    @abstractmethod
    def head_inference(self, M: int) -> None:
        """A head without gradients."""

    @property
    def rows_at_once(self) -> int:
        """Rows of logits that exist together."""
        return logits_rows(self.V)

    def is_chunked(self, M: int) -> bool:
        """Whether `model.chunked_loss` takes them."""
        return self.rows_at_once < M

    def gradients_of(self, name: str, *sizes: int) -> None:
        """Gradients of so many parameters are made, fp32."""
        self.ledger.hold(f"new gradients {name}", "gradients", FP32 * sum(sizes))

    def gradients_arrive(self, name: str) -> None:
        """They become the parameters' own, or are added to what is there and freed."""
        if self.accumulates:
            self.ledger.drop(f"new gradients {name}")

    def hold_all(self, held: Sequence[tuple[str, int]]) -> None:
        """Activations, by name."""
        for name, num_bytes in held:
            self.ledger.hold(name, "activations", num_bytes)
