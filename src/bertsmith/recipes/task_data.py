"""From labelled tables to what fine-tuning learns from and is judged by."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bertsmith.data.checkup.brief import table_warnings
from bertsmith.data.columns import UsualColumns
from bertsmith.data.examples import Examples, ExampleTokenizer
from bertsmith.data.labels import label_ids, label_names, stratified_holdout
from bertsmith.data.tables import Table, read_table
from bertsmith.recipes.config import FinetuneConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that are learned from, or those that are judged by."""

    table: Table
    examples: Examples
    labels_N: Tensor


@dataclass(frozen=True, kw_only=True)
class TaskTables:
    """A task as its tables give it, checked."""

    train: Table
    dev: Table
    labels: tuple[str, ...]
    is_held_out: bool
    """Whether the dev part was taken from the training table."""

    num_leaked: int
    """Dev examples whose text stands in the training part too."""

    @property
    def columns(self) -> UsualColumns:
        """Names of the training table's columns."""
        columns = self.train.columns
        assert columns.label is not None
        return UsualColumns(
            text=columns.text_name, pair=columns.pair_name, label=columns.names[columns.label]
        )

    def describe(self) -> list[str]:
        """What a person should know before training, a line each."""
        columns = self.columns
        texts = (
            repr(columns.text) if columns.pair is None else f"{columns.text!r} and {columns.pair!r}"
        )
        source = "held out of it, each label in proportion" if self.is_held_out else self.dev.path
        lines = [
            f"training: {len(self.train):,} examples of {self.train.path}",
            f"judging: {len(self.dev):,} examples, {source}",
            f"columns: text {texts}, label {columns.label!r}; {len(self.labels)} labels",
        ]
        for table in (self.train,) if self.is_held_out else (self.train, self.dev):
            if table.skipped_rows:
                lines.append(
                    f"{table.skipped_rows:,} rows of {table.path} were skipped; "
                    f"the first: {table.first_skipped}"
                )
        combined = [name for name in self.labels if _looks_combined(name, self.labels)]
        if combined:
            lines.append(
                f"warning: {len(combined):,} labels such as {combined[0]!r} look like several in "
                "one; each is learned as a label of its own (one label a text)"
            )
        if self.num_leaked:
            lines.append(
                f"warning: {self.num_leaked:,} of the {len(self.dev):,} examples to judge by stand "
                "in the training part too; the scores flatter"
            )
        return lines + table_warnings(self.train, self.dev)


def read_task_tables(config: FinetuneConfig) -> TaskTables:
    """Read and check the tables; hold a part out where there is none to judge by.

    Raises:
        UserError: A table cannot be used, or the two do not fit together.
    """
    table = read_table(Path(config.data), config.table)
    labels = label_names(table)
    if config.eval is None:
        learned, held = stratified_holdout(
            table.labels, share=config.holdout_share, seed=config.seed
        )
        train, dev = table.select(learned), table.select(held)
    else:
        has_pairs = table.pairs is not None
        columns = table.columns
        assert columns.label is not None
        usual = UsualColumns(
            text=columns.text_name, pair=columns.pair_name, label=columns.names[columns.label]
        )
        train = table
        dev = read_table(Path(config.eval), config.table, is_pair=has_pairs, usual=usual)
        label_ids(dev, labels, known_from=str(table.path))
    seen = set(_contents(train))
    return TaskTables(
        train=train,
        dev=dev,
        labels=labels,
        is_held_out=config.eval is None,
        num_leaked=sum(content in seen for content in _contents(dev)),
    )


def encode_part(table: Table, labels: tuple[str, ...], tokenizer: ExampleTokenizer) -> Part:
    """Tokenise a table's examples."""
    return Part(
        table=table,
        examples=tokenizer.encode(table.texts, table.pairs),
        labels_N=label_ids(table, labels, known_from=str(table.path)),
    )


def _contents(table: Table) -> list[tuple[str, str]]:
    return list(zip(table.texts, table.pairs or [""] * len(table), strict=True))


def _looks_combined(name: str, labels: tuple[str, ...]) -> bool:
    """Whether a label is a list of other labels."""
    parts = [part.strip() for part in name.replace("|", ",").replace(";", ",").split(",")]
    return len(parts) > 1 and all(part in labels for part in parts)
