"""From labelled tables to what fine-tuning on texts learns from and is judged by."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bertsmith.data.examples import ExampleTokenizer, TrainingSteps
from bertsmith.data.pair_steps import PairSteps
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.data.windows import overlap_unless_cut
from bertsmith.errors import UserError
from bertsmith.hf import read_config
from bertsmith.model.config import EncoderConfig
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.model_folder import fitting_tokenizer, longest_example
from bertsmith.recipes.texts.tables import Part, TaskTables, encode_part, read_task_tables
from bertsmith.tasks.embedding import Embedding


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The task, tokenised."""

    tables: TaskTables
    train: Part
    dev: Part
    steps: TrainingSteps
    longest: int
    """Most tokens of an example."""

    overlap_tokens: int | None
    """That the windows of a longer text share; None: such a text is cut."""

    tokenizer: TextTokenizer
    fingerprint: str

    @property
    def longest_example(self) -> int:
        """Tokens of the longest there is, in either part."""
        return max(int(part.examples.lengths_N.max()) for part in (self.train, self.dev))

    def most_tokens(self, num_examples: int) -> int:
        """Tokens that so many examples to learn from have together, at most."""
        lengths_N = self.train.examples.lengths_N
        num_examples *= len(lengths_N) // len(self.train.table)  # texts apart
        return int(lengths_N.topk(min(num_examples, len(lengths_N))).values.sum())


def open_task(config: FinetuneConfig, source: Path, *, at_once: int) -> TaskData:
    """Read, check and tokenise the tables.

    Args:
        config: Names them.
        source: Folder of the checkpoint, whose tokenizer is used.
        at_once: Devices that share a step.

    Raises:
        UserError: A table, the tokenizer or a setting does not fit.
    """
    tables = read_task_tables(config)
    tokenizer, longest = fit_tokenizer(config, source, tables)
    overlap = None  # an embedding is of one window
    if not tables.kind.is_apart:
        is_pair = tables.columns.pair is not None
        overlap = overlap_unless_cut(
            config.window,
            asked_longest=config.max_sequence_tokens,
            longest=longest,
            num_special=tokenizer.tokenizer.num_special_tokens_to_add(is_pair),
        )
    encoder = ExampleTokenizer(
        tokenizer.tokenizer, max_sequence_tokens=longest, overlap_tokens=overlap
    )
    train_part = encode_part(tables.kind, tables.train, tables.train_labels_N, encoder)
    return TaskData(
        tables=tables,
        train=train_part,
        dev=encode_part(tables.kind, tables.dev, tables.dev_labels_N, encoder),
        steps=_steps_of(config, tables, train_part, at_once=at_once),
        longest=longest,
        overlap_tokens=overlap,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of_tables(tables),
    )


def _steps_of(
    config: FinetuneConfig, tables: TaskTables, part: Part, *, at_once: int
) -> TrainingSteps:
    if isinstance(tables.kind, Embedding):
        return PairSteps(
            part.examples,
            part.labels_N,
            texts_per_row=tables.kind.texts_per_row,
            examples_per_step=config.examples_per_step,
            tokens_per_pack=config.tokens_per_pack,
            seed=config.seed,
            at_once=at_once,
        )
    return TrainingSteps(
        part.examples,
        part.targets_W,
        examples_per_step=config.examples_per_step,
        tokens_per_pack=config.tokens_per_pack,
        seed=config.seed,
        at_once=at_once,
        weights_N=tables.objective.weights(part.targets_W),
    )


def fit_tokenizer(
    config: FinetuneConfig, source: Path, tables: TaskTables
) -> tuple[TextTokenizer, int]:
    """The checkpoint's tokenizer and the longest example, checked against the model.

    Raises:
        UserError: They do not fit the model.
    """
    shape: EncoderConfig = read_config(source)
    is_pair = tables.columns.pair is not None and not tables.kind.is_apart
    if is_pair and shape.type_vocab_size < 2:
        raise UserError(f"{source}: has one token type, so it cannot tell two texts apart")
    longest = longest_example(
        config.max_sequence_tokens, shape.max_position_embeddings, is_pair=is_pair
    )
    return fitting_tokenizer(source, shape), longest


def fingerprint_of_tables(tables: TaskTables) -> str:
    """sha256 of all that is learned from and judged by."""
    digest = hashlib.sha256()
    for table in (tables.train, tables.dev):
        content = [table.texts, table.pairs, table.labels]
        digest.update(json.dumps(content, separators=(",", ":")).encode())
    return digest.hexdigest()
