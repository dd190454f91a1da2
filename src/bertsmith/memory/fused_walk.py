"""A step on the C kernels of a CPU, as `model.fused` and `model.fused_block` take it.

Shape legend: see `walk`.
"""

from bertsmith.memory.walk import FP32, Walk
from bertsmith.model.checkpointing import BlockMode

KEY_ROWS = 48
"""As in attention.c."""


class FusedWalk(Walk):
    """Blocks, embeddings and loss as single steps of autograd, which choose what they keep."""

    def embed(self, T: int) -> None:
        """Hidden states, and a mean and a deviation a row."""
        self.hold_all([("hidden 0", self.b * T * self.D), ("embedding moments", 2 * FP32 * T)])

    def block_forward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """All that the gradient needs is made; what the mode does not keep dies with the function.

        A block that computes again takes its input from the last sum of the block before.
        """
        self._hold_cast(f"cast weights {i}", self.counts.block_products)
        made = self._made_bytes(T, M)
        self.ledger.hold(f"saved {i}", "activations", made)
        with self.ledger.within("active", "workspace", self.b * M * self.F + self._scratch()):
            self.ledger.hold(f"hidden {i + 1}", "activations", self.b * M * self.D)
        if mode != "none":
            self.ledger.drop(f"saved {i}", f"cast weights {i}")
            self.ledger.hold(f"saved {i}", "activations", self._kept_bytes(mode, T, M))
            if i > 0:
                self.ledger.drop(f"hidden {i}")

    def _attended_bytes(self, T: int, M: int) -> int:
        """Queries, of the last block those of the rows wanted; keys, values, contexts, log-sums."""
        return self.b * (2 * T + 2 * M) * self.D + FP32 * M * self.H

    def _sum_bytes(self, M: int) -> int:
        """What a norm takes in, with its means and deviations."""
        return self.b * M * self.D + 2 * FP32 * M

    def _made_bytes(self, T: int, M: int) -> int:
        """What the gradient needs besides the input."""
        inner = self.b * M * (self.D + self.F)
        return self._attended_bytes(T, M) + 2 * self._sum_bytes(M) + inner

    def _kept_bytes(self, mode: BlockMode, T: int, M: int) -> int:
        """Of that, what a block keeps."""
        match mode:
            case "none":
                return self._made_bytes(T, M)
            case "selective":
                return self._attended_bytes(T, M) + 2 * self._sum_bytes(M)
            case "full":
                return self._sum_bytes(M)

    def head_forward(self, M: int) -> None:
        """Transform and masked loss; or pooler and classifier, of a row a sequence."""
        b, D = self.b, self.D
        self._hold_cast("cast head", self.counts.head_products)
        if self.shape.task == "classifier":
            self.ledger.hold("head", "activations", 4 * b * M * D + 8 * M * D)
            return
        self.ledger.hold("head", "activations", 3 * b * M * D + 2 * FP32 * M)
        self._hold_cast("cast table", self.V * D)
        if self.is_chunked(M):
            self._chunked_loss(M)
            return
        self.ledger.hold("logits", "logits", b * M * self.V)
        with self.ledger.within("partial", "workspace", FP32 * self.V * self.shape.threads):
            self.ledger.hold("d bias", "logits", FP32 * (self.V + M))

    def _chunked_loss(self, M: int) -> None:
        """Gradients are made chunk by chunk, and wait for the backward pass; logits do not."""
        b, D, ledger = self.b, self.D, self.ledger
        with ledger.within("logits", "logits", b * self.rows_at_once * self.V + FP32 * M):
            ledger.touch("workspace", FP32 * self.V * self.shape.threads)
            ledger.hold("d transformed", "workspace", b * M * D)
            ledger.hold("d table", "gradients", FP32 * self.V * D)
            ledger.hold("new gradients bias", "gradients", FP32 * self.V)
            if b < FP32:
                ledger.touch("workspace", b * self.V * D)
        ledger.drop("cast table")

    def head_backward(self, M: int) -> None:
        """The logits have become their gradient."""
        b, D, ledger = self.b, self.D, self.ledger
        if self.shape.task == "classifier":
            self.gradients_of("head", self.counts.head)
            ledger.hold("d hidden", "workspace", b * M * D)
            ledger.touch("workspace", 3 * FP32 * M * D)
            ledger.drop("head", "cast head")
            self.gradients_arrive("head")
            return
        if not self.is_chunked(M):
            self._whole_loss_backward(M)
        self.gradients_arrive("bias")
        ledger.hold("d head", "workspace", 2 * b * M * D)
        self.gradients_of("head", self.counts.head - self.V)
        ledger.drop("d head", "d transformed", "head", "cast head")
        ledger.hold("d hidden", "workspace", b * M * D)
        self.gradients_arrive("head")

    def _whole_loss_backward(self, M: int) -> None:
        b, D, ledger = self.b, self.D, self.ledger
        ledger.hold("d transformed", "workspace", FP32 * M * D)
        ledger.hold("scaled", "workspace", b * M * D)
        ledger.touch("workspace", FP32 * M * D)
        if b < FP32:  # the product has the type of its factors, and is then made fp32
            ledger.hold("d table cast", "workspace", b * self.V * D)
        ledger.hold("d table", "gradients", FP32 * self.V * D)
        if b < FP32:
            ledger.drop("d table cast")
        self.gradients_of("bias", self.V)
        ledger.drop("scaled", "logits", "d bias", "cast table")

    def block_backward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """As `_block_backward` goes along; what it names lives until it returns."""
        b, D, F, ledger = self.b, self.D, self.F, self.ledger
        rows = b * M * D
        name = str(i)
        if mode != "none":
            self._hold_cast(f"cast weights {i}", self.counts.block_products)
            again = self._made_bytes(T, M) - self._kept_bytes(mode, T, M)
            ledger.hold(f"saved {i}", "activations", again)
            ledger.hold(f"hidden {i}", "activations", b * T * D if i > 0 else 0)
        twice = 2 if self.drops else 1  # without dropout both gradients of a sum are one tensor
        ledger.hold("second norm", "workspace", twice * rows)
        ledger.hold("d inner", "workspace", b * M * F)
        with ledger.within("active", "workspace", b * M * F):
            self._weight_gradient(name, D * F)
        self._weight_gradient(name, D * F)
        with ledger.within("d middle", "workspace", rows):
            ledger.hold("first norm", "workspace", twice * rows)
        self._weight_gradient(name, D * D)
        d_projected = b * (3 * T if M == T else 2 * T + M) * D
        ledger.hold("d projected", "workspace", d_projected)
        ledger.touch("workspace", rows + self._scratch())
        ledger.hold("d input", "workspace", b * T * D)
        if M < T:
            ledger.touch("workspace", rows + b * 3 * D * D)
        self._weight_gradient(name, 3 * D * D)
        self.gradients_of(name, self.counts.block - self.counts.block_products)
        ledger.drop("second norm", "d inner", "first norm", "d projected", "d hidden")
        ledger.drop(f"saved {i}", f"hidden {i + 1}", f"cast weights {i}", "d input")
        ledger.hold("d hidden", "workspace", b * T * D)
        self.gradients_arrive(name)

    def embed_backward(self, T: int) -> None:
        """The table's gradient from the decoder is added to in place; a classifier's is new."""
        self.ledger.hold("scratch", "workspace", FP32 * T * self.D)
        self.gradients_of("embeddings", self.counts.embeddings)
        if self.shape.task == "classifier":
            self.ledger.hold("d table", "gradients", FP32 * self.V * self.D)
        self.ledger.drop("scratch", "d hidden", "hidden 0", "embedding moments")
        self.gradients_arrive("embeddings")
        if self.accumulates:
            self.ledger.drop("d table")

    def block_inference(self, T: int, M: int) -> None:
        """The same function, whose results are dropped when it returns."""
        self.ledger.touch(
            "activations",
            self.b * T * self.D  # its input
            + self._made_bytes(T, M)
            + self.b * M * (self.F + self.D)
            + (self.b * self.counts.block_products if self.b < FP32 else 0),
        )

    def head_inference(self, M: int) -> None:
        """Logits in torch's own operations: the product, in fp32, and its log-softmax."""
        self.ledger.hold("head", "activations", 2 * self.b * M * self.D)
        if self.shape.task == "masked_lm":
            copies = 2 * FP32 if self.b == FP32 else self.b + 2 * FP32
            rows = min(M, self.rows_at_once)
            self.ledger.touch("logits", copies * rows * self.V)
            if self.b < FP32:
                self.ledger.touch("workspace", self.b * self.V * (self.D + rows))
        self.ledger.drop("head")

    def _weight_gradient(self, name: str, size: int) -> None:
        if self.b < FP32:
            self.ledger.hold("product", "workspace", self.b * size)
        self.gradients_of(name, size)
        if self.b < FP32:
            self.ledger.drop("product")

    def _hold_cast(self, name: str, count: int) -> None:
        """Weights in the type of products, where that is not their own."""
        self.ledger.hold(name, "weights", self.b * count if self.b < FP32 else 0)

    def _scratch(self) -> int:
        """What attention's threads allocate in C, as `scratch_bytes` in attention.c says."""
        longest = -(-self.shape.longest // 64) * 64
        wide = -(-(self.D // self.H) // 16) * 16
        floats = 8 * longest * wide + 6 * KEY_ROWS * longest + 2 * KEY_ROWS * wide
        floats += 6 * longest + 1024
        return self.shape.threads * FP32 * floats
