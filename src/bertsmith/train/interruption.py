"""Ctrl-C and SIGTERM as a flag that the loop reads between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether the run was asked to stop. A second signal changes nothing: the save goes on."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.signal_name: str | None = None

    @property
    def is_requested(self) -> bool:
        """True once a signal has come."""
        return self.signal_name is not None


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Within the block SIGINT and SIGTERM set the flag instead of ending the process."""
    interruption = Interruption()

    def remember(number: int, frame: FrameType | None) -> None:
        interruption.signal_name = signal.Signals(number).name

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, remember)
        except ValueError:  # not in the main thread: whoever runs us owns the signals
            continue
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
