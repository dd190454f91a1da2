"""A fine-tuned model and the task beside its weights, opened together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bertsmith.errors import UserError
from bertsmith.hf.adapter import Adaptable
from bertsmith.hf.stored_adapter import load_adapted
from bertsmith.recipes.model_folder import adapter_folder, model_folder
from bertsmith.recipes.task_file import TASK_FILE, HasLongest, fitting_task

ModelT = TypeVar("ModelT", bound=Adaptable)
FittingT = TypeVar("FittingT", bound=HasLongest)


@dataclass(frozen=True, kw_only=True)
class Opened(Generic[ModelT, FittingT]):
    """A model in fp32 on the CPU, and what is known of its fine-tuning."""

    folder: Path
    """Of the model; with an adapter, of its base."""

    model: ModelT

    labels: tuple[str, ...]
    """Names of its classes; none of a model that has no classes."""

    task: FittingT | None
    """None: the model is not ours."""

    task_file: Path
    """Where the task stands, or would."""

    def longest(self, asked_tokens: int | None) -> int | None:
        """Most tokens of a text: as asked, or else as in fine-tuning; None: nobody says."""
        if asked_tokens is None and self.task is not None:
            return self.task.max_sequence_tokens
        return asked_tokens


def open_model(
    where: str,
    load: Callable[[Path], tuple[ModelT, tuple[str, ...]]],
    read: Callable[[Path], FittingT | None],
    *,
    kind: type[ModelT],
    adapter: str | None,
) -> Opened[ModelT, FittingT]:
    """Open a model folder, a run folder or a hub name.

    Args:
        where: Any of these.
        load: Loads the model, and the names of its classes, from its folder.
        read: Reads its task.
        kind: What the model has to be.
        adapter: Folder of an adapter to merge into it, which then says the task; None: none.

    Raises:
        UserError: One of them cannot be read, or the adapter is for another base or task.
    """
    folder = beside = model_folder(where)
    if adapter is None:
        model, labels = load(folder)
    else:
        beside = adapter_folder(adapter)
        adapted, labels = load_adapted(folder, beside)
        if not isinstance(adapted, kind):
            raise UserError(f"--adapter {adapter}: is for a task of another form")
        model = adapted
    limit = model.encoder.config.max_position_embeddings
    return Opened(
        folder=folder,
        model=model,
        labels=labels,
        task=fitting_task(beside, read, limit=limit),
        task_file=beside / TASK_FILE,
    )
