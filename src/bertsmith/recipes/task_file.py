"""`bertsmith.json`: what a fine-tuned model's weights do not say, beside them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

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


def check_task(content: Mapping[str, Any], name: str) -> None:
    """Refuse the file of another task.

    Raises:
        ValueError: It is one.
    """
    if content["task"] != name:
        raise ValueError(f"task is {content['task']!r}, and the model is one of {name}")


def longest_in(content: Mapping[str, Any]) -> int:
    """Most tokens that the model was trained to read at once.

    Raises:
        ValueError: It is no such number.
    """
    return count_in(content, "max_sequence_tokens", least=3)


def overlap_in(content: Mapping[str, Any]) -> int:
    """Tokens that windows share.

    Raises:
        ValueError: It is no such number.
    """
    overlap, longest = count_in(content, "overlap_tokens"), longest_in(content)
    if 2 * overlap > longest:
        raise ValueError(f"overlap_tokens is {overlap}, of windows of {longest}")
    return overlap


def count_in(content: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """A whole number.

    Raises:
        ValueError: It is none, or less than the least.
    """
    value = content[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} is {value!r}")
    return value


class HasLongest(Protocol):
    """A task that says how long its texts were."""

    @property
    def max_sequence_tokens(self) -> int:
        """Of the longest."""
        ...


FittingT = TypeVar("FittingT", bound=HasLongest)


def fitting_task(
    folder: Path, read: Callable[[Path], FittingT | None], *, limit: int
) -> FittingT | None:
    """What `read` finds beside weights; None in a folder that is not ours.

    Args:
        folder: Of the model, or of the adapter that is merged into it.
        read: Reads a kind of task.
        limit: Positions of the model.

    Raises:
        UserError: The file is damaged, or speaks of longer texts than the model can read.
    """
    task = read(folder)
    if task is not None and task.max_sequence_tokens > limit:
        raise UserError(
            f"{folder / TASK_FILE}: max_sequence_tokens is {task.max_sequence_tokens}, and the "
            f"model has {limit} positions; copy the file that came with the model"
        )
    return task


def scores_in(content: Mapping[str, Any]) -> dict[str, float]:
    """How the weights did on the examples they were judged by, by metric."""
    return {str(name): float(value) for name, value in content["scores"].items()}
