"""Writes checkpoints in the background: training waits for a copy in memory, not for the disk."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.parallel.strategies import shell_of

ModelT = TypeVar("ModelT", bound=nn.Module)


class NonFiniteWeightsError(Exception):
    """Weights or moments are NaN or infinite: such a checkpoint is never written."""

    def __init__(self, name: str) -> None:
        """Say which."""
        super().__init__(
            f"{name} is not finite (NaN or infinite), so the checkpoint is not written"
        )


class Snapshot(Generic[ModelT]):
    """A copy of a model and its moments in memory, whose buffers serve every save of a run.

    It takes 12 bytes a parameter on the CPU from the first save on.
    """

    def __init__(self, model: ModelT) -> None:
        """Make room for a copy; nothing is copied yet.

        Args:
            model: With whole parameters, as it will be given to `take`.
        """
        self.model: ModelT = shell_of(model).to_empty(device="cpu")
        self.moments: list[tuple[str, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Of the model, about what a checkpoint's weights take."""
        return sum(p.numel() * 4 for p in self.model.parameters())

    @torch.no_grad()
    def take(self, model: ModelT, moments: Iterable[tuple[str, Tensor]]) -> None:
        """Copy what is there now."""
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
        for kept, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)
        held = dict(self.moments)
        self.moments = []
        for name, moment in moments:
            copy = held.get(name)
            if copy is None:
                copy = torch.empty(moment.shape, dtype=torch.float32)
            self.moments.append((name, copy.copy_(moment)))

    def check_finite(self) -> None:
        """Refuse what must not be saved.

        Raises:
            NonFiniteWeightsError: A number is NaN or infinite.
        """
        named = [*self.model.named_parameters(), *self.model.named_buffers(), *self.moments]
        for name, tensor in named:
            # numpy computes in this thread alone; torch would start more beside the training's.
            if tensor.is_floating_point() and not np.isfinite(tensor.detach().numpy()).all():
                raise NonFiniteWeightsError(name)


class Saver:
    """One save at a time, in a thread of its own, which the process does not end before."""

    def __init__(self) -> None:
        """Nothing is being saved."""
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        self.last_saved: Path | None = None
        """The newest checkpoint that this saver has seen committed."""

        self.has_saved_last = True
        """Whether the last save that has ended, ended well."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether `take_errors` has something to give."""
        return bool(self._errors) and not self.is_busy

    def begin(self, save: Callable[[], Path], *, then: Callable[[], None]) -> None:
        """Start a save, once the one before has come to its end.

        Args:
            save: Writes a checkpoint from memory that nobody changes meanwhile.
            then: Called when it is safe, in the same thread.
        """
        self.finish()

        def run() -> None:
            try:
                self.last_saved = save()
                self.has_saved_last = True
                then()
            except Exception as error:  # told to the main thread, whatever it is
                self._errors.append(error)
                self.has_saved_last = False

        # No daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=run, name="saver")
        self._thread.start()

    def finish(self) -> None:
        """Return once nothing is being saved."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_errors(self) -> list[Exception]:
        """What ended saves since this was asked last.

        `NotWrittenError`, `NonFiniteWeightsError`, or a fault of ours.
        """
        errors, self._errors = self._errors, []
        return errors
