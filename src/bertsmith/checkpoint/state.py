"""How far a run has come: a few numbers, as all that is random follows from seed and step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a resumed run needs besides weights and moments."""

    step: int = 0
    """Steps done; the next step's data follows from it."""

    updates: int = 0
    """Updates applied: steps without an empty, skipped or overflowed one."""

    overflows: int = 0
    """Updates left out because an fp16 gradient overflowed; the loss scale was halved each time."""

    skipped: tuple[int, ...] = ()
    """Steps (counted from 1) that were passed over because their numbers went wrong, ascending."""

    tokens: int = 0
    """Real tokens trained on."""

    train_seconds: float = 0.0
    """Time in training steps alone."""

    elapsed_seconds: float = 0.0
    """Time in the run, evaluation and saving included."""

    smoothed_loss: float | None = None
    """Training loss, smoothed over about ten steps; None before the first."""

    recent_losses: tuple[float, ...] = ()
    """Of the last steps, oldest first: what a spike is measured against."""

    value: float | None = None
    """Validation score of the weights as they are, larger is better; None if they were not
    judged."""

    best_value: float | None = None
    """Best validation score so far."""

    best_step: int | None = None
    """Step it was seen at."""

    least_loss: float | None = None
    """Least validation loss so far, where the score is another metric."""

    evaluations_since_best: int = 0
    """In a row in which neither the score nor the loss was better than ever before."""

    owes_evaluation: bool = False
    """Whether a signal cut short the evaluation of this very step: it has to be made first."""

    micro_batch_tokens: int | None = None
    """Most tokens in one pass, since larger ones did not fit or by choice; None: whole packs."""

    loss_scale: float | None = None
    """The fp16 scaler's scale; None for other formats."""

    loss_scale_streak: int = 0
    """Steps since the scaler last changed."""

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The state that `to_json` wrote.

        Raises:
            TypeError: A value is missing that has no default, or is none of ours.
        """
        lists = {f.name for f in fields(cls) if isinstance(f.default, tuple)}
        plain: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in values.items()}
        return cls(**plain)
