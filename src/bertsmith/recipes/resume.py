"""Going on with a run: which checkpoint, and whether it is still the same run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bertsmith.errors import UserError
from bertsmith.report.run_folder import CONFIG_FILE
from bertsmith.train.checkpoint import fingerprint_of, newest_checkpoint, read_state

FREE_KEYS = (
    *("data", "eval", "output"),  # paths; what the data holds has a fingerprint of its own
    *("resume", "overwrite", "log_every_steps", "device", "save", "parallel"),
)
"""Keys that may differ between a run and its continuation: they do not change what is learned."""


def fingerprints_of(config: Any, data_fingerprint: str) -> dict[str, str]:
    """What a continuation must agree with.

    Args:
        config: A verb's config.
        data_fingerprint: Of the training data.
    """
    return {"config": fingerprint_of(_bound_values(config)), "data": data_fingerprint}


def checkpoint_to_resume(
    folder: Path, config: Any, data_fingerprint: str, say: Callable[[str], None]
) -> Path | None:
    """The checkpoint to go on from; None to start anew.

    Raises:
        UserError: The run in the folder has other settings or other data.
    """
    if not config.resume:
        return None
    checkpoint = newest_checkpoint(folder / "checkpoints", say)
    if checkpoint is None:
        say("nothing to resume: starting anew")
        return None
    stored, wanted = read_state(checkpoint)[1], fingerprints_of(config, data_fingerprint)
    if stored.get("data") != wanted["data"]:
        raise UserError(
            f"{folder}: cannot resume: the training data has changed since {checkpoint.name}; "
            "train into a new folder"
        )
    if stored.get("config") != wanted["config"]:
        raise UserError(
            f"{folder}: cannot resume with other settings ({_difference(folder, config)}); repeat "
            "them as they were, or train into a new folder"
        )
    return checkpoint


def _bound_values(config: Any) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {k: v for k, v in values.items() if k not in FREE_KEYS}


def _difference(folder: Path, config: Any) -> str:
    """Which keys differ: `steps: was 100, is 200`."""
    try:
        before = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return "the old ones cannot be read"
    old, new = flat(before), flat(_bound_values(config))
    changes = [f"{k}: was {old.get(k)}, is {v}" for k, v in new.items() if old.get(k) != v]
    return "; ".join(changes) or "keys were removed"


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
