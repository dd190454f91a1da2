"""Going on with a run: which checkpoint, and whether it is still the same run."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.checkpoint.folder import Identity, newest_checkpoint, read_state, steps_in
from bertsmith.errors import UserError
from bertsmith.recipes.config import PretrainConfig, TrainingConfig
from bertsmith.report.run_folder import versions
from bertsmith.say import Say

FREE_KEYS = (
    *("data", "eval", "output"),  # paths; what the data holds has fingerprints of its own
    *("resume", "resume_override", "overwrite", "log_every_steps", "device"),
    "micro_batch",  # cuts packs, and moves rounding alone
    "checkpointing",  # computes blocks again, to the bit
    # Pretraining only looks: no step depends on it. Of what scores, `eval.max_tokens` is held, or
    # scores of another sample would be compared; and so is all of fine-tuning's (`monitor`,
    # `patience`, `eval_every_steps`), which picks the model and ends the run.
    "eval.every_steps",
)
"""Keys that may differ between a run and its continuation: they do not change what is learned."""

FREE_GROUPS = (
    *("save", "parallel"),
    "guard",  # whoever resumes after NaN wants to change it, and it changes nothing before
)
"""Groups of such keys."""

UNRESOLVED = {"precision": "auto"}
"""What checkpoints may say that were made before the format itself was stored: as good as nothing,
as nobody knows what it meant there."""

KEYS_BEFORE = {
    "masking.schedule": "independent",
    "masking.unit": "token",
    "masking.rare_boost": 0.0,
    "masking.share_schedule": "constant",
    "objective": "mlm",
    "lora.rank": 0,
    "task": "classification",
    "loss.class_weights": "none",
    "loss.label_smoothing": 0.0,
    "loss.focal_gamma": 0.0,
    "decide.thresholds": "half",
    "decide.calibrate": False,
}
"""What runs did before they had these keys."""

MOST_SHOWN = 6
"""Differences that an error names."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint to go on from."""

    checkpoint: str
    """Its path."""

    is_changed: bool
    """Whether the run goes on with other settings or data than it has, with leave."""


def identity_of(
    config: TrainingConfig, verb: str, data: Mapping[str, str], *, precision: str
) -> Identity:
    """What a continuation must agree with.

    Args:
        config: The verb's.
        verb: Its name.
        data: Fingerprints of the training data ("data") and the tokenizer ("tokenizer").
        precision: What the config's comes to on this machine.
    """
    settings = flat(dataclasses.asdict(config)) | {"precision": precision}
    plain = json.loads(json.dumps(settings, default=str))
    return Identity(verb=verb, config=plain, data=dict(data), versions=versions())


def as_begun(config: PretrainConfig, say: Say) -> PretrainConfig:
    """The config of a run to go on with; one begun before masking covered stays independent.

    Args:
        config: The verb's.
        say: Told if the run keeps its old way.
    """
    masking = config.masking
    if (
        not config.resume
        or masking.schedule == "independent"
        or "masking.schedule" in config.resume_override
        or not _began_before(Path(config.output) / "checkpoints", "masking.schedule")
    ):
        return config
    say(
        "this run was begun before masking covered: it goes on with --masking.schedule "
        "independent (to change that: --resume.override masking.schedule)"
    )
    return replace(config, masking=replace(masking, schedule="independent"))


def _began_before(folder: Path, key: str) -> bool:
    """Whether the newest checkpoint that can be read knows no such key; they are not verified."""
    for step in reversed(steps_in(folder)):
        try:
            return key not in read_state(folder / f"step-{step}")[1].config
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: whoever goes on from it will say so
    return False


def checkpoint_to_resume(
    folder: Path, now: Identity, overridden: Iterable[str], say: Say
) -> Found | None:
    """The checkpoint to go on from; None to start anew.

    Args:
        folder: The run folder.
        now: The run as it is started now.
        overridden: Keys that may differ from the checkpoint's.
        say: Told about damaged checkpoints, and what differs with leave.

    Raises:
        UserError: The run in the folder has other settings or other data, or is of another verb.
    """
    overridden = [key for item in overridden for key in item.replace(",", " ").split()]
    _check_names(now, overridden)
    checkpoint = newest_checkpoint(folder / "checkpoints", say)
    if checkpoint is None:
        say("nothing to resume: starting anew")
        return None
    before = read_state(checkpoint)[1]
    if before.verb != now.verb:
        raise UserError(f"{folder}: cannot resume: it holds a run of {before.verb}, not {now.verb}")
    changed = _differences(before, now)
    refused = {key: text for key, text in changed.items() if key not in set(overridden)}
    if refused:
        shown = "; ".join(list(refused.values())[:MOST_SHOWN])
        if len(refused) > MOST_SHOWN:
            shown += f"; and {len(refused) - MOST_SHOWN} more"
        raise UserError(
            f"{folder}: cannot resume {checkpoint.name}: {shown}; repeat it as it was, accept the "
            f"change with --resume.override {' '.join(list(refused)[:MOST_SHOWN])}, or train into "
            "a new folder"
        )
    for text in changed.values():
        say(f"resumed in spite of a change: {text}")
    return Found(checkpoint=str(checkpoint), is_changed=bool(changed))


def _differences(before: Identity, now: Identity) -> dict[str, str]:
    """What differs, by key, in words.

    A key that one side does not know came or went with a version, and is not held against a run,
    unless `KEYS_BEFORE` says what that version did.
    """
    changed, known_before = {}, KEYS_BEFORE | dict(before.config)
    for key, value in now.config.items():
        is_free = key in FREE_KEYS or key.split(".", 1)[0] in FREE_GROUPS
        if is_free or key not in known_before:
            continue
        old = known_before[key]
        if (key, old) not in UNRESOLVED.items() and old != value:
            changed[key] = f"{key} was {_said(old)}, is {_said(value)}"
    names = {"data": "the training data has changed", "tokenizer": "the tokenizer has changed"}
    for key, fingerprint in now.data.items():
        known = before.data.get(key)
        if known != fingerprint:
            short = f"fingerprint was {(known or 'none')[:12]}, is {fingerprint[:12]}"
            changed[key] = f"{names[key]} ({short})"
    return changed


def _check_names(now: Identity, overridden: Iterable[str]) -> None:
    known = {*now.config, *now.data}
    unknown = [key for key in overridden if key not in known]
    if unknown:
        raise UserError(
            f"--resume.override {unknown[0]}: no such key; name settings as the command line does "
            "(optim.learning_rate), or data, or tokenizer"
        )


def _said(value: object) -> str:
    return "null" if value is None else str(value)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
