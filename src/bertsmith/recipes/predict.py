"""`bertsmith predict`: label the texts of a file or of standard input, in their order.

Rows are taken in windows: tokenised and sorted by length inside a window, written back in the
table's order. Memory is bounded by a window whatever the file's size, and the next window is
read and tokenised while the model works on this one.

Shape legend: N sequences, C classes.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.batch import PackedBatch
from bertsmith.data.examples import Examples, packs_by_length
from bertsmith.data.tables import Row, TableReader
from bertsmith.recipes.classifier import Classifier, ahead, open_classifier
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predictions import check_columns, check_output, prediction_file

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
    source, output = Path(config.data), Path(config.output)
    check_output(output, overwrite=config.overwrite, source=source)
    classifier = open_classifier(
        config.model,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    num_rows = num_cut = 0
    started_at_seconds = time.perf_counter()
    with TableReader(
        source,
        config.table,
        is_labelled=False,
        is_pair=classifier.is_pair,
        usual=classifier.usual,
        keeps_columns=True,
        takes_lines=True,
    ) as reader:
        columns = reader.columns.names
        labels = classifier.labels if classifier.kind.has_chances else ()
        check_columns(columns, labels, where=config.data)
        windows = _windows(reader, classifier, tokens_per_pack=config.tokens_per_pack)
        with prediction_file(
            output, columns, labels, escape_formulas=config.escape_formulas
        ) as write_row:
            # A read ahead of a terminal could not be interrupted.
            for window in windows if config.data == "-" else ahead(windows):
                answers = classifier.kind.answers(
                    _logits_NC(classifier, window), classifier.labels, classifier.decisions
                )
                for row, answer in zip(window.rows, answers, strict=True):
                    write_row(row.values, answer)
                num_rows += len(window.rows)
                num_cut += window.examples.num_cut
    return PredictSummary(
        num_rows=num_rows,
        num_cut=num_cut,
        skipped_rows=reader.skipped_rows,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _windows(
    reader: TableReader, classifier: Classifier, *, tokens_per_pack: int
) -> Iterator[_Window]:
    """Read and tokenise, a window at a time."""
    rows = iter(reader)
    while window := list(itertools.islice(rows, ROWS_PER_WINDOW)):
        has_pairs = reader.columns.pair is not None
        examples = classifier.tokenizer.encode(
            [r.text for r in window], [r.pair or "" for r in window] if has_pairs else None
        )
        packs = packs_by_length(
            examples.lengths_N, range(len(window)), tokens_per_pack=tokens_per_pack
        )
        yield _Window(
            rows=window, examples=examples, packs=[(some, examples.pack(some)) for some in packs]
        )


def _logits_NC(classifier: Classifier, window: _Window) -> Tensor:
    """Scores of each row of a window, in the rows' order."""
    logits_NC = torch.empty(len(window.rows), len(classifier.labels))
    for rows, batch in window.packs:
        logits_NC[torch.tensor(rows)] = classifier.logits_NC(batch)
    return logits_NC
