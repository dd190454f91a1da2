"""Which form a file or a model is of: the one place that knows all of them."""

from typing import Any

from bertsmith.errors import UserError
from bertsmith.hf.config_json import CONFIG_NAME
from bertsmith.hf.stored_adapter import task_type_of
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.form import Form
from bertsmith.recipes.model_folder import adapter_folder, found_folder
from bertsmith.recipes.questions.form import Questions
from bertsmith.recipes.tagging.form import Tags
from bertsmith.recipes.texts.form import Embeddings, Texts
from bertsmith.tasks.config import AnswerConfig

TEXTS = Texts()
FORMS: tuple[Form[Any, Any], ...] = (Tags(), Questions(), Embeddings(), TEXTS)
"""In the order in which they are asked; the last one takes what is left."""


def form_of_data(config: FinetuneConfig) -> Form[Any, Any]:
    """The form of what is to be learned.

    Raises:
        UserError: The data cannot be read, or is of another form than is asked for.
    """
    found = next(form for form in FORMS if form.is_asked(config))
    if config.answer != AnswerConfig() and not isinstance(found, Questions):
        raise UserError(f"--answer: is for questions on texts, which {config.data} does not hold")
    return found


def form_of_model(where: str, *, adapter: str | None = None) -> Form[Any, Any]:
    """The form of a model, by a model folder, a run folder or a hub name.

    With an adapter it is what the adapter is for. Whatever cannot be opened is left to the form of
    texts, which will say why.

    Raises:
        UserError: The adapter is none.
    """
    if adapter is not None:
        task = task_type_of(adapter_folder(adapter))
        return next((form for form in FORMS if form.adapter_task == task), TEXTS)
    folder = found_folder(where)
    if folder is None or not (folder / CONFIG_NAME).exists():
        return TEXTS
    return next(form for form in FORMS if form.is_of(folder))
