"""An account of what is held in memory: the walk through a step writes it, the peak is read off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Category = Literal[
    "weights", "gradients", "moments", "activations", "logits", "workspace", "snapshot"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Ledger:
    """Bytes that are held now, by name, and the most that were ever held at once."""

    def __init__(self) -> None:
        """Nothing is held."""
        self._held: dict[str, tuple[Category, int]] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self.peak_bytes = 0
        self.at_peak = dict(self._now)

    def hold(self, name: str, category: Category, num_bytes: int) -> None:
        """Allocate; more under a name that is held already is added to it."""
        before = self._held.get(name, (category, 0))[1]
        self._held[name] = (category, before + num_bytes)
        self._now[category] += num_bytes
        now = sum(self._now.values())
        if now > self.peak_bytes:
            self.peak_bytes, self.at_peak = now, dict(self._now)

    def drop(self, *names: str) -> None:
        """Free what was held under these names."""
        for name in names:
            category, num_bytes = self._held.pop(name)
            self._now[category] -= num_bytes

    def holds(self, name: str) -> bool:
        """Whether something is held under a name, be it of no size."""
        return name in self._held

    def touch(self, category: Category, num_bytes: int) -> None:
        """Allocate and free at once."""
        self.hold("touched", category, num_bytes)
        self.drop("touched")

    @contextmanager
    def within(self, name: str, category: Category, num_bytes: int) -> Iterator[None]:
        """Hold for the length of a block."""
        self.hold(name, category, num_bytes)
        yield
        self.drop(name)

    def start_phase(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes, self.at_peak = sum(self._now.values()), dict(self._now)
