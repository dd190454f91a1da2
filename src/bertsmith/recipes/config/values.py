"""Values that several verbs take, and what is refused of any."""

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]


def check_at_least_one(config: object, *names: str) -> None:
    """Raise ValueError where a field that is given is under 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
