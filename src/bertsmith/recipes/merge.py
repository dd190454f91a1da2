"""`bertsmith merge`: a base and an adapter in, one model folder out, for programs without LoRA."""

import shutil
from pathlib import Path

from bertsmith.data.tokenizer import load_tokenizer, write_tokenizer
from bertsmith.errors import UserError
from bertsmith.hf import recover_model, save_model
from bertsmith.hf.adapter import Adaptable
from bertsmith.hf.sentence import write_sentence_files
from bertsmith.hf.stored_adapter import load_adapted
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.span_model import SpanModel
from bertsmith.model.token_classifier import TokenClassifier
from bertsmith.recipes.config import MergeConfig
from bertsmith.recipes.model_folder import adapter_folder, model_folder
from bertsmith.recipes.questions.task import read_answer_task
from bertsmith.recipes.tagging.task import read_tagging_task
from bertsmith.recipes.task_file import TASK_FILE
from bertsmith.recipes.texts.task import read_task


def main(config: MergeConfig) -> int:
    """Merge, and print the model's folder."""
    print(merge_folders(config))
    return 0


def merge_folders(config: MergeConfig) -> Path:
    """Write the model and return its folder.

    Raises:
        UserError: Base, adapter or output cannot be used, or the adapter is for another base.
    """
    output, adapter = Path(config.output), adapter_folder(config.adapter)
    recover_model(output.absolute())
    _check_output(config, output, adapter)
    source = model_folder(config.model)
    model, labels = load_adapted(source, adapter)
    _check_task(model, adapter)
    has_tokenizer = (adapter / "tokenizer.json").exists()
    tokenizer = load_tokenizer(adapter if has_tokenizer else source)
    longest = tokenizer.config.get("model_max_length")
    limit = model.encoder.config.max_position_embeddings

    def write_more(fresh: Path) -> None:
        write_tokenizer(fresh, tokenizer)
        if (adapter / TASK_FILE).exists():
            shutil.copyfile(adapter / TASK_FILE, fresh / TASK_FILE)
        if isinstance(model, SentenceEmbedder):
            write_sentence_files(
                fresh,
                pooling=model.pooling,
                width=model.num_outputs,
                max_sequence_tokens=min(longest, limit) if isinstance(longest, int) else limit,
            )

    save_model(output, model, labels=labels, write_more=write_more)
    return output


def _check_task(model: Adaptable, adapter: Path) -> None:
    """Refuse an adapter whose file on its task is damaged, or of another task.

    Raises:
        UserError: As said.
    """
    match model:
        case TokenClassifier():
            read_tagging_task(adapter)
        case SpanModel():
            read_answer_task(adapter)
        case _:
            read_task(adapter)


def _check_output(config: MergeConfig, output: Path, adapter: Path) -> None:
    """Refuse to replace what is no model, or is being read.

    Raises:
        UserError: As said.
    """
    for option, path in (("model", Path(config.model)), ("adapter", adapter)):
        if path.exists() and path.resolve().is_relative_to(output.resolve()):
            raise UserError(f"--output {output}: holds --{option} {path}; name a new folder")
    if output.resolve().is_relative_to(adapter.resolve()):
        raise UserError(f"--output {output}: lies in --adapter {adapter}; name another folder")
    if not output.exists():
        return
    is_empty = output.is_dir() and not any(output.iterdir())
    is_model = (output / "config.json").exists()
    if not is_empty and not is_model:
        raise UserError(f"--output {output}: holds files that are no model; name a new folder")
    if is_model and not config.overwrite:
        raise UserError(f"--output {output}: holds a model; name a new folder, or give --overwrite")
