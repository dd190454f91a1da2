"""`bertsmith predict`: label the texts of a file or of standard input, in their order.

Rows are taken in windows: tokenised and sorted by length inside a window, written back in the
table's order. Memory is bounded by a window whatever the file's size, and the next window is
read and tokenised while the model works on this one.

Shape legend: N sequences, C classes.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.batch import PackedBatch
from bertsmith.data.examples import Examples, packs_by_length
from bertsmith.data.tables import Row, TableReader
from bertsmith.errors import UserError
from bertsmith.model.lora import share_equal
from bertsmith.recipes.classifier import Classifier, ahead, open_classifier
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predictions import (
    Predicted,
    check_columns,
    check_output,
    prediction_file,
)
from bertsmith.recipes.tagging.predict import predict_tags
from bertsmith.recipes.tagging.task import is_tagger

ROWS_PER_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """What `predict` did."""

    num_rows: int
    num_cut: int
    """Texts that were longer than the model reads, and lost their end."""

    skipped_rows: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Rows on their way through the model."""

    rows: list[Row]
    reads: list["_Read"]
    """By model."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A window's rows as one model reads them."""

    examples: Examples
    packs: list[tuple[list[int], PackedBatch]]


def main(config: PredictConfig) -> int:
    """Predict, and say on standard error what was done."""
    summary = predict(config)
    rate = summary.num_rows / max(summary.seconds, 1e-9)
    notes = [
        f"{summary.num_rows:,} texts labelled in {summary.seconds:.1f} s ({rate:,.0f} a second)"
    ]
    if summary.num_cut:
        notes.append(f"{summary.num_cut:,} were too long and lost their end")
    if summary.skipped_rows:
        notes.append(f"{summary.skipped_rows:,} rows could not be used and were skipped")
    print("; ".join(notes), file=sys.stderr)
    return 0


def predict(config: PredictConfig) -> PredictSummary:
    """Label every row of the table and write the predictions.

    Raises:
        UserError: The model, the table or the output cannot be used. The output then does not
            exist, or is what it was.
    """
    if is_tagger(config.model):
        num_sentences, seconds = predict_tags(config)
        return PredictSummary(num_rows=num_sentences, num_cut=0, skipped_rows=0, seconds=seconds)
    source, output = Path(config.data), Path(config.output)
    check_output(output, overwrite=config.overwrite, source=source)
    classifiers, predicted = _open_classifiers(config)
    first = classifiers[0]
    num_rows = num_cut = 0
    started_at_seconds = time.perf_counter()
    with TableReader(
        source,
        config.table,
        is_labelled=False,
        is_pair=first.is_pair,
        usual=first.usual,
        keeps_columns=True,
        takes_lines=True,
    ) as reader:
        columns = reader.columns.names
        check_columns(columns, predicted, where=config.data)
        windows = _windows(reader, classifiers, tokens_per_pack=config.tokens_per_pack)
        with prediction_file(
            output, columns, predicted, escape_formulas=config.escape_formulas
        ) as write_row:
            # A read ahead of a terminal could not be interrupted.
            for window in windows if config.data == "-" else ahead(windows):
                answers = [
                    one.kind.answers(
                        _logits_NC(one, read, num_rows=len(window.rows)), one.labels, one.decisions
                    )
                    for one, read in zip(classifiers, window.reads, strict=True)
                ]
                for row, *of_row in zip(window.rows, *answers, strict=True):
                    write_row(row.values, of_row)
                num_rows += len(window.rows)
                num_cut += max(read.examples.num_cut for read in window.reads)
    return PredictSummary(
        num_rows=num_rows,
        num_cut=num_cut,
        skipped_rows=reader.skipped_rows,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _open_classifiers(config: PredictConfig) -> tuple[list[Classifier], list[Predicted]]:
    """The model, or one a given adapter, which then share what they have alike.

    Raises:
        UserError: One cannot be used, or two adapters do not go together.
    """
    adapters: list[str] | list[None] = config.adapter or [None]
    opened = [
        open_classifier(
            config.model,
            adapter=adapter,
            max_sequence_tokens=config.max_sequence_tokens,
            precision=config.precision,
            device=config.device,
        )
        for adapter in adapters
    ]
    if len(opened) == 1:
        return opened, [Predicted(labels=_with_chances(opened[0]))]
    names = [_name_of(adapter) for adapter in config.adapter]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UserError(
            f"--adapter: two are named {twice[0]!r}, after their folders; rename one of these"
        )
    for adapter, one in zip(config.adapter, opened, strict=True):
        if one.is_pair != opened[0].is_pair:
            raise UserError(
                f"--adapter {adapter}: reads {'pairs' if one.is_pair else 'single texts'} and "
                f"{config.adapter[0]} does not; give them one after the other"
            )
        share_equal(opened[0].model, one.model)
    predicted = [
        Predicted(name=name, labels=_with_chances(one))
        for name, one in zip(names, opened, strict=True)
    ]
    return opened, predicted


def _name_of(adapter: str) -> str:
    """Of its folder; of a run's `adapter/` the run's."""
    folder = Path(adapter).absolute()
    return folder.parent.name if folder.name == "adapter" else folder.name


def _windows(
    reader: TableReader, classifiers: list[Classifier], *, tokens_per_pack: int
) -> Iterator[_Window]:
    """Read and tokenise, a window at a time."""
    rows = iter(reader)
    while window := list(itertools.islice(rows, ROWS_PER_WINDOW)):
        texts = [row.text for row in window]
        pairs = [row.pair or "" for row in window] if reader.columns.pair is not None else None
        reads = []
        for classifier in classifiers:
            examples = classifier.tokenizer.encode(texts, pairs)
            packs = packs_by_length(
                examples.lengths_N, range(len(window)), tokens_per_pack=tokens_per_pack
            )
            reads.append(
                _Read(examples=examples, packs=[(some, examples.pack(some)) for some in packs])
            )
        yield _Window(rows=window, reads=reads)


def _with_chances(classifier: Classifier) -> Sequence[str]:
    """The labels that get a probability."""
    return classifier.labels if classifier.kind.has_chances else ()


def _logits_NC(classifier: Classifier, read: _Read, *, num_rows: int) -> Tensor:
    """Scores of each row of a window, in the rows' order."""
    logits_NC = torch.empty(num_rows, len(classifier.labels))
    for rows, batch in read.packs:
        logits_NC[torch.tensor(rows)] = classifier.logits_NC(batch)
    return logits_NC
