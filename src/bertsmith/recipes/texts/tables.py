"""From labelled tables to what fine-tuning learns from and is judged by."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.data.checkup.brief import table_warnings
from bertsmith.data.columns import Columns, UsualColumns
from bertsmith.data.examples import Examples, ExampleTokenizer
from bertsmith.data.pair_tables import read_pair_cells
from bertsmith.data.tables import LabelledTable, read_cells
from bertsmith.errors import UserError
from bertsmith.hf.sentence import read_pooling
from bertsmith.model.objectives import Objective
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.embedding import embedding_kind
from bertsmith.tasks.infer import ChosenTask, choose_task
from bertsmith.tasks.kind import TaskKind


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that are learned from, or those that are judged by."""

    table: LabelledTable[Any]
    examples: Examples
    labels_N: Tensor
    """What the task's kind makes of the rows' labels."""

    @property
    def targets_W(self) -> Tensor:
        """Those of the examples: a text that is read in windows has its label in each."""
        return self.labels_N[self.examples.owners_N]


@dataclass(frozen=True, kw_only=True)
class TaskTables:
    """A task as its tables give it, checked."""

    kind: TaskKind[Any]
    kind_said: str
    """Which kind it is, and why, in a line."""

    train: LabelledTable[Any]
    dev: LabelledTable[Any]
    labels: tuple[str, ...]
    """Names of the model's outputs."""

    train_labels_N: Tensor
    """What the kind makes of the labels to learn from."""

    dev_labels_N: Tensor
    objective: Objective
    is_held_out: bool
    """Whether the dev part was taken from the training table."""

    num_leaked: int
    """Dev examples whose text stands in the training part too."""

    @property
    def columns(self) -> UsualColumns:
        """Names of the training table's columns."""
        return _usual(self.train.columns)

    def describe(self) -> list[str]:
        """What a person should know before training, a line each."""
        columns = self.columns
        texts = (
            repr(columns.text) if columns.pair is None else f"{columns.text!r} and {columns.pair!r}"
        )
        source = f"held out of it, {self.kind.holdout_said}" if self.is_held_out else self.dev.path
        label = repr(columns.label) if columns.label else "in columns of their own"
        if self.kind.is_apart and not columns.label:
            label = "none"
        outputs = f"; {len(self.labels)} labels" if self.kind.has_chances else ""
        lines = [
            self.kind_said,
            f"training: {len(self.train):,} examples of {self.train.path}",
            f"judging: {len(self.dev):,} examples, {source}",
            f"columns: text {texts}, label {label}{outputs}",
        ]
        for table in (self.train,) if self.is_held_out else (self.train, self.dev):
            if table.skipped_rows:
                lines.append(
                    f"rows of {table.path} that were skipped: {table.skipped_rows:,}; the first: "
                    f"{table.first_skipped}"
                )
        if self.kind.name == "classification":
            lines += _warn_of_combined(self.labels)
        lines += self.kind.warnings(self.dev_labels_N, self.labels, what="the examples to judge by")
        if self.num_leaked:
            lines.append(
                f"warning: {self.num_leaked:,} of the {len(self.dev):,} examples to judge by stand "
                "in the training part too; the scores flatter"
            )
        return lines + table_warnings(self.train, self.dev)


def read_task_tables(config: FinetuneConfig) -> TaskTables:
    """Read and check the tables; hold a part out where there is none to judge by.

    Raises:
        UserError: A table cannot be used, the two do not fit together, or the task has not what the
            config asks for.
    """
    if config.task == "embedding":
        cells = read_pair_cells(Path(config.data), config.table)
        kind, why = embedding_kind(cells, config.embedding)
        chosen = ChosenTask(kind=kind, said=f"task: embedding, as --task says; {why}")
    else:
        cells = read_cells(Path(config.data), config.table)
        chosen = choose_task(config.task, cells, config.table)
    return _checked_tables(config, cells, chosen)


def _checked_tables(
    config: FinetuneConfig, cells: LabelledTable[object], chosen: ChosenTask
) -> TaskTables:
    kind = chosen.kind
    monitor_of(config, kind)
    kind.check_decide(config.decide)
    table = kind.read(cells, config.table)
    labels = kind.output_names(table)
    if config.eval is None:
        learned, held = kind.holdout(table, share=config.holdout_share, seed=config.seed)
        train, dev = table.select(learned), table.select(held)
    else:
        train = table
        usual = _usual(table.columns)
        dev_cells = (
            read_pair_cells(Path(config.eval), config.table, usual=usual)
            if kind.is_apart
            else read_cells(
                Path(config.eval), config.table, is_pair=table.pairs is not None, usual=usual
            )
        )
        dev = kind.read(dev_cells, config.table)
    known_from = str(table.path)
    train_labels_N = kind.targets(train, labels, known_from=known_from)
    dev_labels_N = kind.targets(dev, labels, known_from=known_from)
    _check_monitor(config, kind, dev_labels_N, labels)
    seen = set(_contents(train))
    return TaskTables(
        kind=kind,
        kind_said=chosen.said,
        train=train,
        dev=dev,
        labels=labels,
        train_labels_N=train_labels_N,
        dev_labels_N=dev_labels_N,
        objective=kind.objective(config.loss, train_labels_N, labels),
        is_held_out=config.eval is None,
        num_leaked=sum(content in seen for content in _contents(dev)),
    )


def monitor_of(config: FinetuneConfig, kind: TaskKind[Any]) -> str:
    """The metric that picks the best weights.

    Raises:
        UserError: The task has no such metric.
    """
    known = kind.monitors
    if config.monitor == "auto":
        return known[0]
    if config.monitor not in known:
        raise UserError(
            f"--monitor {config.monitor}: {kind.name} has no such metric; take one of "
            f"{', '.join(known)}"
        )
    return config.monitor


def _check_monitor(
    config: FinetuneConfig, kind: TaskKind[Any], dev_labels_N: Tensor, labels: tuple[str, ...]
) -> None:
    """Refuse a metric that the examples to judge by leave undefined, before anything is trained."""
    monitor = monitor_of(config, kind)
    no_scores_NC = torch.zeros(len(dev_labels_N), len(labels))
    if monitor not in kind.metrics(no_scores_NC, dev_labels_N, labels, Decisions()).by_name():
        raise UserError(
            f"--monitor {monitor}: is not defined on the examples to judge by, which have no label "
            "that some of them have and others not; give another --eval table or --monitor"
        )


def as_found(config: FinetuneConfig, kind: TaskKind[Any], source: Path) -> FinetuneConfig:
    """The config with what `auto` came to: the run's files say it, and a resumed run holds it.

    Raises:
        UserError: The model at `source` pools in a way that bertsmith has not.
    """
    embedding = config.embedding
    if kind.is_apart and embedding.pooling == "auto":
        embedding = replace(embedding, pooling=read_pooling(source) or "mean")
    return replace(config, task=kind.name, monitor=monitor_of(config, kind), embedding=embedding)


def encode_part(
    kind: TaskKind[Any], table: LabelledTable[Any], labels_N: Tensor, tokenizer: ExampleTokenizer
) -> Part:
    """Tokenise a table's examples, as the kind of task reads them."""
    return Part(table=table, examples=kind.encode(table, tokenizer), labels_N=labels_N)


def _usual(columns: Columns) -> UsualColumns:
    return UsualColumns(
        text=columns.text_name,
        pair=columns.pair_name,
        label="" if columns.label is None else columns.label_name,
        labels=tuple(columns.names[i] for i in columns.labels),
    )


def _warn_of_combined(labels: tuple[str, ...]) -> list[str]:
    combined = [name for name in labels if _looks_combined(name, labels)]
    if not combined:
        return []
    return [
        f"warning: {len(combined):,} labels such as {combined[0]!r} look like several in one; each "
        "is learned as a label of its own (several a text: --task multilabel)"
    ]


def _contents(table: LabelledTable[Any]) -> list[tuple[str, str]]:
    return list(zip(table.texts, table.pairs or [""] * len(table), strict=True))


def _looks_combined(name: str, labels: tuple[str, ...]) -> bool:
    """Whether a label is a list of other labels."""
    parts = [part.strip() for part in name.replace("|", ",").replace(";", ",").split(",")]
    return len(parts) > 1 and all(part in labels for part in parts)
