"""SIGTERM, SIGUSR1 and Ctrl-C: before training they end the run, from then on they are a flag."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the end that schedulers announce; SLURM's usual warning before a time limit."""


class Interruption:
    """Whether the run was asked to stop. A second signal changes nothing: the save goes on."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.signal_name: str | None = None
        self._is_deferred = False

    @property
    def is_requested(self) -> bool:
        """True once a signal has come."""
        return self.signal_name is not None

    def defer(self) -> None:
        """From here on there is something to save: signals wait until somebody looks."""
        self._is_deferred = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        """A signal has come.

        Raises:
            KeyboardInterrupt: There is nothing to save yet.
        """
        self.signal_name = signal.Signals(number).name
        if not self._is_deferred:
            raise KeyboardInterrupt(self.signal_name)


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Within the block signals go to the interruption instead of ending the process."""
    interruption = Interruption()
    before = {}
    for number in SIGNALS:
        try:
            before[number] = signal.signal(number, interruption.receive)
        except ValueError:  # not in the main thread: whoever runs us owns the signals
            continue
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
