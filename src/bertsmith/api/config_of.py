"""From an object's parameters to the config of `bertsmith finetune`."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from bertsmith.errors import UserError

ConfigT = TypeVar("ConfigT")


def with_options(config: ConfigT, options: Mapping[str, Any]) -> ConfigT:
    """The config with some of its values replaced.

    Args:
        config: A config dataclass, which may hold others.
        options: Values by key, a nested one with dots: `{"optim.learning_rate": 1e-4}`.

    Raises:
        UserError: A key is unknown, or a value is refused.
    """
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for key, value in options.items():
        name, dot, rest = key.partition(".")
        group = getattr(config, name, None)
        if name not in known or (dot and not dataclasses.is_dataclass(group)):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"options: unknown key {key!r}{hint}")
        if dot:
            nested.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, inner in nested.items():
        own[name] = with_options(own.get(name, getattr(config, name)), inner)
    try:
        return dataclasses.replace(config, **own)  # type: ignore[type-var]
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
