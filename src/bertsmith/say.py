"""The type of what is told a line: a person's terminal, a log, a list."""

from typing import Protocol


class Say(Protocol):
    """Tells a person a line, or notes it for one."""

    def __call__(self, line: str, /) -> object:
        """Say it."""
