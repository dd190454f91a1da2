"""A step of a frozen encoder with adapters: torch's operations, on a CPU with the C attention.

As the plain walk, less what is only there for gradients of weights: products keep their input only
where an adapter reads it, and nothing is kept below the lowest adapter.

Shape legend: see `walk`; R the ranks of the adapters of one product together.
"""

from bertsmith.memory.ledger import Ledger
from bertsmith.memory.plain_walk import KEEP_BYTES, PlainWalk
from bertsmith.memory.shapes import RunShape
from bertsmith.memory.walk import FP32
from bertsmith.model.checkpointing import BlockMode

PRODUCTS = (("query", "key", "value"), ("attention_out",), ("inner",), ("inner_out",))
"""Targets by the product that they add to, in the order in which a block comes by them."""


class LoraWalk(PlainWalk):
    """Every operation is a node of autograd's own, and most are frozen."""

    def __init__(self, shape: RunShape, ledger: Ledger, *, accumulates: bool) -> None:
        """As the base."""
        super().__init__(shape, ledger, accumulates=accumulates)
        adapters = shape.adapters
        assert adapters is not None, "chosen for that"
        self.has_kernels = shape.body == "kernels"
        self.drops_input = adapters.drops
        self.num_adapters = [
            sum(one in adapters.targets for one in targets) for targets in PRODUCTS
        ]
        self.ranks = [adapters.rank * count for count in self.num_adapters]
        self.lowest = next(i for i, count in enumerate(self.num_adapters) if count)
        """The first product of a block that has an adapter: in block 0 gradients end there."""

    def _reaches(self, i: int, product: int) -> bool:
        """Whether the backward pass comes by block i's product, or by what stands before it."""
        return i > 0 or product > self.lowest

    def embed(self, T: int) -> None:
        """Frozen: there is nothing but the result."""
        size = T * self.D
        if self.has_kernels:
            self.ledger.hold("hidden 0", "activations", self.b * size)
            return
        self.ledger.touch("workspace", 3 * FP32 * size)
        self.ledger.hold("hidden 0", "activations", FP32 * size)
        self._draw(size, FP32)

    def block_forward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Attention, then the feed-forward half; then what no gradient needs is gone."""
        name, rows = str(i), M * self.D
        self._hold_cast(f"cast weights {i}", self.counts.block_products)
        self._attended_lora(i, T, M)
        if mode == "selective":
            self._forget_probabilities(name)
        self._fed_lora(i, M)
        if mode != "none":
            self._free(*self._fed_kept(name))
        if mode == "full":
            self._free(*self._attended_kept(name))
        with self.ledger.within("added", "workspace", self.b * rows):
            self._drop_out(f"fed {name}", rows, self.b)
            self.ledger.hold(f"last sum {name}", "activations", self.s * rows + 2 * FP32 * M)
        self.ledger.hold(f"hidden {i + 1}", "activations", self.s * rows)
        self._free(f"middle {name}")
        if mode != "full" and (self.has_copies or not self.num_adapters[0]):
            self._free(f"hidden {i}")

    def _attended_lora(self, i: int, T: int, M: int) -> None:
        """Up to the sum that the first norm takes in."""
        b, s, D, ledger, name = self.b, self.s, self.D, self.ledger, str(i)
        if self.has_copies:
            ledger.hold(f"input {name}", "activations", b * T * D)
        self._low_rank(f"low input {name}", 0, T, D, is_reached=i > 0)
        with ledger.within("attention", "workspace", 0):
            self._attention_forward(name, T)
            if not self.has_kernels:
                ledger.hold("attention", "workspace", 2 * b * T * D)
        if not self.num_adapters[0]:
            self._free(f"input {name}")
        if not self._reaches(i, 1) and not self.num_adapters[0]:
            self._free(f"projected {name}", f"probabilities {name}")
        if M < T or not self.has_kernels:
            ledger.hold(f"context {name}", "activations", b * M * D)
        self._low_rank(f"low context {name}", 1, M, D, is_reached=self._reaches(i, 1))
        with ledger.within("added", "workspace", b * M * D):
            self._drop_out(f"attended {name}", M * D, b, keeps=self._reaches(i, 2))
            ledger.hold(f"first sum {name}", "activations", s * M * D + 2 * FP32 * M)
        if not self.num_adapters[1]:
            self._free(f"context {name}")

    def _fed_lora(self, i: int, M: int) -> None:
        """The first norm, and the feed-forward half up to its last product."""
        b, s, ledger, name, rows = self.b, self.s, self.ledger, str(i), M * self.D
        ledger.hold(f"middle {name}", "activations", s * rows)
        if not self._reaches(i, 2):
            self._free(f"first sum {name}")
        if self.has_copies or self.num_adapters[2]:
            ledger.hold(f"middle cast {name}", "activations", b * rows if self.has_copies else 0)
        self._low_rank(f"low middle {name}", 2, M, self.D, is_reached=self._reaches(i, 2))
        ledger.hold(f"inner {name}", "activations", b * M * self.F)
        if not self.num_adapters[2]:
            self._free(f"middle cast {name}")
        ledger.hold(f"active {name}", "activations", b * M * self.F)
        if not self._reaches(i, 3):
            self._free(f"inner {name}")
        self._low_rank(f"low active {name}", 3, M, self.F, is_reached=self._reaches(i, 3))
        ledger.touch("workspace", b * rows)
        if not self.num_adapters[3]:
            self._free(f"active {name}")
        if self.num_adapters[2] and not self.has_copies:  # kept as A's input
            ledger.hold(f"middle cast {name}", "activations", s * rows)
            ledger.drop(f"middle {name}")
            ledger.hold(f"middle {name}", "activations", 0)

    def _attended_kept(self, name: str) -> list[str]:
        names = ("projected", "probabilities", "context", "attended", "first sum", "input")
        return [f"{one} {name}" for one in (*names, "low input", "low context")]

    def _fed_kept(self, name: str) -> list[str]:
        names = ("inner", "active", "middle cast", "low middle", "low active")
        return [f"{one} {name}" for one in names]

    def _attention_forward(self, name: str, T: int) -> None:
        """The C kernel keeps its arguments, its result, and a number a token and head."""
        if not self.has_kernels:
            super()._attention_forward(name, T)
            return
        size = self.b * T * self.D
        self.ledger.hold(f"projected {name}", "activations", 4 * size + FP32 * T * self.H)

    def _low_rank(
        self, name: str, product: int, rows: int, width: int, *, is_reached: bool
    ) -> None:
        """What adapters keep: T x R, and with a dropout of theirs their inputs and masks."""
        count = self.num_adapters[product]
        if not count:
            return
        self.ledger.hold(name, "activations", self.b * rows * self.ranks[product])
        if self.drops_input:
            size = rows * width
            for _ in range(count):
                self.ledger.touch("workspace", KEEP_BYTES * size)
                self.ledger.touch("workspace", 2 * self.s * size + size)
                mask = size if is_reached else 0
                self.ledger.hold(name, "activations", self.b * size + mask)

    def block_backward(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        """Node after node, down to the lowest adapter."""
        b, s, D, F, ledger = self.b, self.s, self.D, self.F, self.ledger
        name, rows = str(i), M * D
        ledger.hold("d sum", "workspace", s * rows)
        self._free("d hidden", f"hidden {i + 1}", f"last sum {name}")
        ledger.hold("d added", "workspace", b * rows)
        if self.drops:
            ledger.touch("workspace", b * rows)
            ledger.drop(f"fed {name}")
        if mode == "full":
            self._attended_lora(i, T, M)
        if mode != "none":
            self._fed_lora(i, M)
            self._free(f"middle {name}")
        self._backward_of_fed(i, rows, M, F)
        if self._reaches(i, 1):
            self._backward_of_attended(i, mode, T, M)
        self.gradients_of(name, self.counts.block)
        self._free(*self._attended_kept(name), *self._fed_kept(name))
        self._free(f"cast weights {i}", "d sum", "d context", "d projected", "d input")
        ledger.hold("d hidden", "workspace", s * T * D if i else 0)
        if i == 0:
            self._free("hidden 0")
        self.gradients_arrive(name)

    def _backward_of_fed(self, i: int, rows: int, M: int, F: int) -> None:
        b, s, ledger, name = self.b, self.s, self.ledger, str(i)
        if self._reaches(i, 3):
            with ledger.within("d active", "workspace", b * M * F):
                if self.num_adapters[3]:  # through the adapter first, which then is done
                    ledger.touch("workspace", self.drops_input * b * M * F)
                    self._free(f"active {name}", f"low active {name}")
                    ledger.touch("workspace", b * M * F)
                ledger.hold("d inner", "workspace", b * M * F)
        ledger.drop("d added")
        if self._reaches(i, 2):
            self._free(f"inner {name}")
            ledger.hold("d middle", "workspace", b * rows)
            if self.num_adapters[2]:
                ledger.touch("workspace", (1 + self.drops_input) * s * rows)
            self._free("d inner", *self._fed_kept(name))
            ledger.touch("workspace", 2 * s * rows)
            self._free(f"first sum {name}", "d middle")
        self._free("d inner")

    def _backward_of_attended(self, i: int, mode: BlockMode, T: int, M: int) -> None:
        b, s, D, ledger, name = self.b, self.s, self.D, self.ledger, str(i)
        ledger.hold("d context", "workspace", 2 * b * M * D)
        if self.num_adapters[1]:
            ledger.touch("workspace", (1 + self.drops_input) * b * M * D)
        self._free(f"attended {name}")
        if M < T:  # spread over all rows again: what is added to first
            ledger.hold("d input", "workspace", s * T * D if i else 0)
            ledger.hold("d context", "workspace", b * T * D)
        if not (i or self.num_adapters[0]):
            return
        if mode == "selective" and self.drops_probs and not self.has_kernels:
            self._free(f"projected {name}")
            self._attention_forward(name, T)
        if self.has_kernels:
            ledger.hold("d projected", "workspace", 3 * b * T * D)
        else:
            self._attention_backward(name, T)
            ledger.touch("workspace", 3 * b * T * D)
        self._free("d context", f"projected {name}", f"context {name}")
        if i:
            ledger.hold("d input", "workspace", (b + s if self.has_copies else s) * T * D)
        if self.num_adapters[0]:
            ledger.touch("workspace", (1 + self.drops_input) * s * T * D if i else 0)

    def embed_backward(self, T: int) -> None:
        """Not come by."""
        self._free("d hidden")

    def _forget_probabilities(self, name: str) -> None:
        if self.drops_probs and not self.has_kernels:
            self._free(f"probabilities {name}")

    def _draw(self, size: int, bytes_each: int) -> None:
        """A dropout of what needs no gradient."""
        if self.drops:
            self.ledger.touch("workspace", KEEP_BYTES * size)
            self.ledger.touch("workspace", size + 2 * bytes_each * size)

    def _drop_out(self, name: str, size: int, bytes_each: int, *, keeps: bool = True) -> None:
        if keeps:
            self._dropout(name, size, bytes_each)
        else:
            self._draw(size, bytes_each)

    def _free(self, *names: str) -> None:
        """Drop what is held of these."""
        self.ledger.drop(*(name for name in names if self.ledger.holds(name)))
