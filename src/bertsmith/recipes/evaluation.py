"""What `evaluate` found, whatever the form of the data."""

from collections.abc import Mapping
from dataclasses import dataclass

from bertsmith.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` found."""

    model: str
    adapter: str | None
    data: str
    metrics: Metrics
    intervals: Mapping[str, tuple[float, float]]
    """From and to of each score at 95 % confidence; empty unless asked for."""

    num_cut: int
    """Examples that were longer than the model reads, and lost their end."""

    skipped_rows: int
    precision: str
    """Of the forward pass: scores near a tie may differ from one to another."""

    seconds: float
    """From the first text tokenised to the last one counted."""
