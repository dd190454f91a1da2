"""`bertsmith.json`: what a fine-tuned model's weights do not say, beside them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bertsmith.errors import UserError

TASK_FILE = "bertsmith.json"

TaskT = TypeVar("TaskT")


def write_task_file(folder: Path, task: str, values: Mapping[str, object]) -> None:
    """Put the file into a model folder.

    Args:
        folder: The model's.
        task: What kind of task it is.
        values: All else, plain values by name.
    """
    text = json.dumps({"task": task, **values}, indent=2, ensure_ascii=False) + "\n"
    (folder / TASK_FILE).write_text(text, encoding="utf-8")


def read_task_file(folder: Path, parse: Callable[[Mapping[str, Any]], TaskT]) -> TaskT | None:
    """What `parse` makes of the file; None in a folder without one, which is not ours.

    Raises:
        UserError: The file is damaged.
    """
    file = folder / TASK_FILE
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not readable ({error}); fine-tune again or delete it") from error


def scores_in(content: Mapping[str, Any]) -> dict[str, float]:
    """How the weights did on the examples they were judged by, by metric."""
    return {str(name): float(value) for name, value in content["scores"].items()}
