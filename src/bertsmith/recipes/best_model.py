"""`model/` of a fine-tuning run: the best weights so far, or on their way there."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import nn

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.checkpoint.saver import Snapshot
from bertsmith.errors import UserError

ModelT = TypeVar("ModelT", bound=nn.Module)


class BestModel(Generic[ModelT]):
    """Writes better weights at once; those that a full disk keeps out wait in memory.

    They are written before the next checkpoint, which is not made without them: it says that there
    are such weights. So a run that goes on from a checkpoint has them, or makes them again.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Nothing waits; `say` is told in a line when something begins to."""
        self._say = say
        self._waiting: Callable[[], None] | None = None
        self._writing = threading.RLock()  # checkpoints are written in a thread of their own

    @property
    def is_waiting(self) -> bool:
        """Whether there are weights that could not be written yet."""
        return self._waiting is not None

    def keep(self, model: ModelT, write: Callable[[ModelT], None]) -> None:
        """Write better weights, in place of those before.

        Args:
            model: In one piece; copied if it has to wait.
            write: Writes them whole or not at all; raises `UserError` if it cannot.
        """
        with self._writing:
            self._waiting = None
            try:
                write(model)
            except UserError as error:
                copy = Snapshot(model)
                copy.take(model, [])
                self._waiting = lambda: write(copy.model)
                self._say(f"{error}; the best weights wait in memory")

    def flush_to_disk(self) -> None:
        """Write what waits.

        Raises:
            NotWrittenError: It cannot be, and waits on.
        """
        with self._writing:
            if self._waiting is None:
                return
            try:
                self._waiting()
            except UserError as error:
                raise NotWrittenError(str(error)) from error
            self._waiting = None

    def forget(self) -> None:
        """Drop what waits: the run has gone back to before it."""
        with self._writing:
            self._waiting = None
