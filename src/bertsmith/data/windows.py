"""Texts that are longer than a model reads: windows that overlap. Neither torch nor numpy here."""

from dataclasses import dataclass
from typing import Literal

from bertsmith.errors import UserError


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """How a text that is longer than the model reads is read all the same."""

    overlap_tokens: int | None = None
    """Tokens that a window shares with the one before. None: a quarter of the model's limit, or, if
    `max_sequence_tokens` is given, no windows: longer texts are cut."""

    merge: Literal["mean", "max"] = "mean"
    """How the windows of a text give one answer: the mean of their probabilities (of their numbers,
    if those are what the model says), or the largest."""

    def __post_init__(self) -> None:
        """Reject what is none."""
        if self.overlap_tokens is not None and self.overlap_tokens < 0:
            raise ValueError(f"overlap_tokens is {self.overlap_tokens}; it must not be negative")
        if self.merge not in ("mean", "max"):
            raise ValueError(f"merge is {self.merge!r}; it must be mean or max")


def overlap_of(config: WindowConfig, *, longest: int, num_special: int) -> int:
    """Tokens that windows share.

    Args:
        config: Of the windows.
        longest: Most tokens of a window.
        num_special: How many of these are special ones.

    Raises:
        UserError: Windows would not move on, or hardly.
    """
    room = longest - num_special
    if config.overlap_tokens is None:
        return room // 4
    if 2 * config.overlap_tokens > room:
        raise UserError(
            f"--window.overlap_tokens {config.overlap_tokens} is more than half of the {room} text "
            f"tokens of a window, so that windows would hardly move on; give {room // 2} at most"
        )
    return config.overlap_tokens


def overlap_unless_cut(
    config: WindowConfig, *, asked_longest: int | None, longest: int, num_special: int
) -> int | None:
    """As `overlap_of`; None where texts that are too long are to be cut.

    They are, if the user says how long an example may be and nothing of windows.
    """
    if config.overlap_tokens is None and asked_longest is not None:
        return None
    return overlap_of(config, longest=longest, num_special=num_special)
