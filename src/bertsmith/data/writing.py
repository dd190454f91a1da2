"""Writing that failed: what was being written, what it was of, and how much more was to come."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class WritingError(Exception):
    """The disk did not take something; whoever knows the output says so to the user."""

    def __init__(self, file: str, reason: str, doing: str, needed_bytes: int | None) -> None:
        """Note what is known.

        Args:
            file: What was being written.
            reason: What the system said.
            doing: What of the input it was: a part, a document.
            needed_bytes: About how much was still to be written; None if others know better.
        """
        # All of them for `Exception`, which is how they come back from another process.
        super().__init__(file, reason, doing, needed_bytes)
        self.file, self.reason, self.doing, self.needed_bytes = file, reason, doing, needed_bytes

    def __str__(self) -> str:
        return f"{self.file}: cannot be written ({self.reason}) at {self.doing}"


def writing_error(
    error: OSError, file: Path, doing: str, needed_bytes: int | None = None
) -> WritingError:
    """What to raise for a system's error."""
    where = error.filename if isinstance(error.filename, str) else str(file)
    return WritingError(where, error.strerror or str(error), doing, needed_bytes)


@contextmanager
def writing(file: Path, doing: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a system's error in the block into a `WritingError`."""
    try:
        yield
    except OSError as error:
        raise writing_error(error, file, doing, needed_bytes) from error
