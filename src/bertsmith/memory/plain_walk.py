"""A step in torch's own operations, as autograd takes it: on a GPU, or without the C kernels.

What lives is what autograd's formulas keep. On a GPU in a 16-bit format autocast computes norms in
fp32, so the residual stream is fp32 and each product's input a copy.

Shape legend: see `walk`; N = T H S probabilities, for sequences of S tokens.
"""

from bertsmith.memory.ledger import Ledger
from bertsmith.memory.shapes import RunShape
from bertsmith.memory.walk import FP32, Walk
from bertsmith.model.checkpointing import BlockMode

KEEP_BYTES = 24
"""Of an element whose dropout is drawn: `dropout.keep_of` has three int64 tensors at its height."""


class PlainWalk(Walk):
    """Every operation is a node of autograd's own."""

    def __init__(self, shape: RunShape, ledger: Ledger, *, accumulates: bool) -> None:
        """As the base."""
        super().__init__(shape, ledger, accumulates=accumulates)
        self.casts = self.b < FP32
        self.s = FP32 if shape.device == "cuda" else self.b
        """Of a number in the residual stream."""

        self.has_copies = self.casts and self.s == FP32

    def embed(self, T: int) -> None:
        """The norm keeps the sum of the three vectors, dropout its mask."""
        size = T * self.D
        self.ledger.hold("embedded", "activations", FP32 * size + 2 * FP32 * T)
        self.ledger.hold("hidden 0", "activations", FP32 * size)
        self._dropout("embedding", size, FP32)
        if self.casts and not self.has_copies:
            self.ledger.touch("activations", self.b * size)

    def block_forward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Attention, then the feed-forward half."""
        name = str(i)
        self._hold_cast(f"cast weights {i}", self.counts.block_products)
        self._attended(name, T, M)
        if mode == "selective" and self.drops_probs:
            self.ledger.drop(f"probabilities {name}")
        self._fed_forward(name, M)
        rows = M * self.D
        with self.ledger.within("added", "workspace", self.b * rows):
            self._dropout(f"fed {name}", rows, self.b)
            self.ledger.hold(f"last sum {name}", "activations", self.s * rows + 2 * FP32 * M)
        self.ledger.hold(f"hidden {i + 1}", "activations", self.s * rows)
        if self.has_copies:
            self.ledger.drop(f"middle {name}")
            if mode != "full":  # the stream itself is not needed again
                self.ledger.drop(f"hidden {i}")
                self.ledger.hold(f"hidden {i}", "activations", 0)
        if mode != "none":
            self.ledger.drop(*self._fed_names(name))
        if mode == "full":
            self.ledger.drop(*self._attended_names(name))

    def _attended(self, name: str, T: int, M: int) -> None:
        """Up to the sum that the first norm takes in."""
        b, s, D, ledger = self.b, self.s, self.D, self.ledger
        if self.has_copies:
            ledger.hold(f"input {name}", "activations", b * T * D)
        with ledger.within("attention", "workspace", 0):
            self._attention_forward(name, T)
            ledger.hold("attention", "workspace", 2 * b * T * D)  # by heads, by groups, by pack
        ledger.hold(f"context {name}", "activations", b * M * D)
        if M < T:  # the rows wanted, of what is added to
            ledger.hold(f"context {name}", "activations", s * M * D)
        with ledger.within("added", "workspace", b * M * D):
            self._dropout(f"attended {name}", M * D, b)
            ledger.hold(f"first sum {name}", "activations", s * M * D)

    def _fed_forward(self, name: str, M: int) -> None:
        """The first norm, and the feed-forward half up to its last product."""
        rows = M * self.D
        self.ledger.hold(f"middle {name}", "activations", self.s * rows + 2 * FP32 * M)
        if self.has_copies:
            self.ledger.hold(f"middle cast {name}", "activations", self.b * rows)
        self.ledger.hold(f"inner {name}", "activations", 2 * self.b * M * self.F)

    def _attended_names(self, name: str) -> list[str]:
        names = ["projected", "context", "first sum", "input"]
        names += ["attended"] if self.drops else []
        names += ["probabilities"] if self.drops_probs else []
        return [f"{one} {name}" for one in names if one != "input" or self.has_copies]

    def _fed_names(self, name: str) -> list[str]:
        names = ["inner", "middle cast" if self.has_copies else "middle"]
        return [f"{one} {name}" for one in names]

    def _attention_forward(self, name: str, T: int) -> None:
        """Probabilities reach memory where they are dropped out; else an own kernel attends."""
        b, ledger = self.b, self.ledger
        ledger.hold(f"projected {name}", "activations", 3 * b * T * self.D)
        if not self.drops_probs:
            # The kernel keeps its own result; groups are then joined into another tensor.
            is_joined = self.shape.device == "cpu" or not self.casts
            kept = b * T * self.D if is_joined else 0
            ledger.hold(f"projected {name}", "activations", kept + FP32 * T * self.H)
            return
        N = T * self.H * self.shape.longest
        with ledger.within("copies", "workspace", 3 * b * T * self.D + b * N):  # and scores
            ledger.touch("workspace", FP32 * N if self.casts else b * N)
            ledger.hold(f"probabilities {name}", "activations", FP32 * N)
            ledger.touch("workspace", KEEP_BYTES * N)
            ledger.hold(f"probabilities {name}", "activations", N)
            ledger.touch("workspace", 2 * FP32 * N)
            ledger.hold(f"probabilities {name}", "activations", b * N)

    def head_forward(self, M: int) -> None:
        """Transform, decoder and cross-entropy; or pooler and classifier."""
        b, s, D, ledger = self.b, self.s, self.D, self.ledger
        self._hold_cast("cast head", self.counts.head_products)
        if self.shape.task == "classifier":
            ledger.hold("head", "activations", 4 * s * M * D + M * D)
            if self.drops:
                ledger.touch("workspace", KEEP_BYTES * M * D)
            return
        copies = 2 * b if self.has_copies else 0
        ledger.hold("head", "activations", (2 * b + s + copies) * M * D + 2 * FP32 * M)
        self._hold_cast("cast table", self.V * D)
        if self.is_chunked(M):
            self._chunked_forward(M)
            return
        with ledger.within("logits in products", "logits", b * M * self.V):
            wide = FP32 * M * self.V if self.casts else 0
            with ledger.within("wide logits", "logits", wide):
                ledger.hold("log-softmax", "logits", FP32 * M * self.V)

    def head_backward(self, M: int) -> None:
        """Gradients of the logits, then of the decoder, then of the transform."""
        s, D, ledger = self.s, self.D, self.ledger
        if self.shape.task == "classifier":
            self.gradients_of("head", self.counts.head)
            ledger.touch("workspace", 3 * s * M * D)
            ledger.drop("head", "cast head")
            ledger.hold("d hidden", "workspace", s * M * D)
            self.gradients_arrive("head")
            return
        if self.is_chunked(M):
            if self.makes_logits_again:
                self._hold_cast("cast table", self.V * D)
                self._chunks(M, with_gradients=True)
                ledger.drop("cast table")
        else:
            self._whole_loss_backward(M)
        self.gradients_of("head", self.counts.head)
        ledger.touch("workspace", 2 * s * M * D)
        ledger.drop("head", "cast head", "d transformed")
        ledger.hold("d hidden", "workspace", s * M * D)
        self.gradients_arrive("head")

    def _whole_loss_backward(self, M: int) -> None:
        b, D, ledger = self.b, self.D, self.ledger
        with ledger.within("d losses", "logits", FP32 * M * self.V):
            ledger.hold("d logits", "logits", FP32 * M * self.V)
        ledger.drop("log-softmax")
        if self.casts:
            ledger.hold("d logits cast", "logits", b * M * self.V)
            ledger.drop("d logits")
            ledger.hold("d logits", "logits", 0)
            ledger.hold("d table cast", "workspace", b * self.V * D)
        ledger.hold("d transformed", "workspace", b * M * D)
        ledger.hold("d table", "gradients", FP32 * self.V * D)
        if self.casts:
            ledger.drop("d table cast", "d logits cast")
        ledger.drop("d logits", "cast table")

    @property
    def makes_logits_again(self) -> bool:
        """Whether a loss in chunks leaves its gradients to the backward pass."""
        return self.shape.number_format == "fp16"

    def _chunked_forward(self, M: int) -> None:
        self._chunks(M, with_gradients=not self.makes_logits_again)
        self.ledger.drop("cast table")

    def _chunks(self, M: int, *, with_gradients: bool) -> None:
        """A chunk's logits, in fp32 too where products are not; then what it adds to gradients."""
        b, D, ledger = self.b, self.D, self.ledger
        size = self.rows_at_once * self.V
        with ledger.within("logits", "logits", b * size + FP32 * M):
            if self.casts:
                ledger.touch("logits", FP32 * size)
            if with_gradients:
                ledger.hold("d transformed", "workspace", b * M * D)
                ledger.hold("d table", "gradients", FP32 * self.V * D)
                if self.casts:  # the second chunk's logits come beside the first one's gradients
                    ledger.touch("logits", FP32 * size)
                    ledger.touch("workspace", b * self.V * D)

    def block_backward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Node after node; what a node has kept is freed when it is done."""
        b, s, D, F, ledger = self.b, self.s, self.D, self.F, self.ledger
        name, rows = str(i), M * self.D
        ledger.hold("d sum", "workspace", s * rows)
        ledger.drop("d hidden", f"hidden {i + 1}")
        ledger.hold("d added", "workspace", b * rows)
        if self.drops:
            ledger.touch("workspace", b * rows)
            ledger.drop(f"fed {name}")
        if mode == "full":
            self._attended(name, T, M)
        if mode != "none":
            self._fed_forward(name, M)
            if self.has_copies:
                ledger.drop(f"middle {name}")
        with ledger.within("d active", "workspace", b * M * F):
            self._weight_gradient(name, D * F)
            ledger.hold("d inner", "workspace", b * M * F)
        ledger.drop("d added", f"last sum {name}")
        ledger.hold("d middle", "workspace", b * rows)
        self._weight_gradient(name, D * F)
        ledger.drop("d inner", *self._fed_names(name))
        ledger.touch("workspace", 2 * s * rows)
        ledger.drop(f"first sum {name}", "d middle")
        ledger.hold("d context", "workspace", 2 * b * rows)
        self._weight_gradient(name, D * D)
        if M < T:
            ledger.hold("d context", "workspace", b * T * D)
        if mode == "selective" and self.drops_probs:
            ledger.drop(f"projected {name}")
            self._attention_forward(name, T)
        self._attention_backward(name, T)
        ledger.drop("d context")
        ledger.touch("workspace", 3 * b * T * D)  # of a group, within that of the pack
        self._weight_gradient(name, 3 * D * D)
        ledger.hold("d input", "workspace", (b + s if self.has_copies or M < T else s) * T * D)
        self.gradients_of(name, self.counts.block - self.counts.block_products)
        gone = (f"probabilities {name}", f"first sum {name}")
        ledger.drop(*(one for one in self._attended_names(name) if one not in gone))
        ledger.drop(f"cast weights {i}", "d sum", "d projected", "d input")
        ledger.hold("d hidden", "workspace", s * T * D)
        self.gradients_arrive(name)

    def _attention_backward(self, name: str, T: int) -> None:
        b, ledger = self.b, self.ledger
        if self.drops_probs:
            N = T * self.H * self.shape.longest
            with ledger.within("d value", "workspace", b * T * self.D):
                ledger.touch("workspace", (2 * FP32 - b) * N)
            ledger.drop(f"probabilities {name}")
            with ledger.within("d scores", "workspace", 2 * b * N):
                ledger.hold("d projected", "workspace", 3 * b * T * self.D)
            ledger.hold("d projected", "workspace", 0)
            return
        ledger.hold("d projected", "workspace", 3 * b * T * self.D)
        ledger.touch("workspace", 3 * b * T * self.D)

    def embed_backward(self, T: int) -> None:
        """The table's two gradients are made apart, and their sum is a third."""
        ledger = self.ledger
        size = FP32 * T * self.D
        ledger.touch("workspace", 2 * size)
        with ledger.within("d embedded", "workspace", size):
            ledger.drop("embedded", "d hidden", "hidden 0")
            if self.drops:
                ledger.drop("embedding")
            self.gradients_of("embeddings", self.counts.embeddings)
            if self.shape.task == "masked_lm":
                ledger.touch("gradients", 2 * FP32 * self.V * self.D)
            else:
                ledger.hold("d table", "gradients", FP32 * self.V * self.D)
        self.gradients_arrive("embeddings")
        if self.accumulates:
            ledger.drop("d table")

    def block_inference(self, T: int, M: int) -> None:
        """No dropout, and nothing outlives its use."""
        b, s, D = self.b, self.s, self.D
        with self.ledger.within("hidden", "activations", s * T * D):
            cast = b * T * D if self.has_copies else 0
            self.ledger.touch("activations", cast + 6 * b * T * D)
            self.ledger.touch("activations", 2 * s * M * D + 2 * b * M * self.F)

    def head_inference(self, M: int) -> None:
        """Logits, in fp32, and their log-softmax."""
        self.ledger.hold("head", "activations", 3 * self.s * M * self.D)
        if self.shape.task == "masked_lm":
            copies = self.b + 2 * FP32 if self.casts else 2 * FP32
            self.ledger.touch("logits", copies * min(M, self.rows_at_once) * self.V)
        self.ledger.drop("head")

    def _dropout(self, name: str, size: int, bytes_each: int) -> None:
        """A mask of a byte an element is kept; drawing it and applying it take more."""
        if not self.drops:
            return
        self.ledger.touch("workspace", KEEP_BYTES * size)
        self.ledger.hold(name, "activations", size)
        self.ledger.touch("workspace", 2 * bytes_each * size)

    def _weight_gradient(self, name: str, size: int) -> None:
        if self.casts:
            self.ledger.hold("product", "workspace", self.b * size)
        self.gradients_of(name, size)
        if self.casts:
            self.ledger.drop("product")

    def _hold_cast(self, name: str, count: int) -> None:
        """Copies of weights in the type of products; they outlive the autocast that made them."""
        self.ledger.hold(name, "weights", self.b * count if self.casts else 0)
