"""`bertsmith predict` of a classifier: label the texts of a file or of standard input.

Rows are taken in chunks: tokenised and sorted by length inside a chunk, written back in the
table's order. Memory is bounded by a chunk whatever the file's size, and the next chunk is
read and tokenised while the model works on this one.

Shape legend: N sequences, C classes.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.batch import PackedBatch
from bertsmith.data.examples import Examples, evaluation_packs
from bertsmith.data.tables import Row, TableReader
from bertsmith.errors import UserError
from bertsmith.model.lora import share_equal
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predictions import (
    Predicted,
    PredictSummary,
    check_columns,
    check_output,
    prediction_file,
)
from bertsmith.recipes.texts.task import Classifier, open_classifier
from bertsmith.tasks.kind import Answer

ROWS_PER_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Rows on their way through the model."""

    rows: list[Row]
    reads: list["_Read"]
    """By model."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A chunk's rows as one model reads them."""

    examples: Examples
    packs: list[tuple[list[int], PackedBatch]]


def predict_labels(config: PredictConfig) -> PredictSummary:
    """Label every row of the table and write the predictions.

    Raises:
        UserError: The model, the table or the output cannot be used. The output then does not
            exist, or is what it was.
    """
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
        chunks = _chunks(reader, classifiers, tokens_per_pack=config.tokens_per_pack)
        with prediction_file(
            output, columns, predicted, escape_formulas=config.escape_formulas
        ) as write_row:
            # A read ahead of a terminal could not be interrupted.
            for chunk in chunks if config.data == "-" else ahead(chunks):
                answers = [
                    one.kind.answers(_logits_NC(one, read), one.labels, one.decisions)
                    for one, read in zip(classifiers, chunk.reads, strict=True)
                ]
                for row, *of_row in zip(chunk.rows, *answers, strict=True):
                    write_row(row.values, of_row)
                num_rows += len(chunk.rows)
                num_cut += max(read.examples.num_cut for read in chunk.reads)
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


def _chunks(
    reader: TableReader, classifiers: list[Classifier], *, tokens_per_pack: int
) -> Iterator[_Chunk]:
    """Read and tokenise, a chunk at a time."""
    rows = iter(reader)
    while chunk := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        texts = [row.text for row in chunk]
        pairs = [row.pair or "" for row in chunk] if reader.columns.pair is not None else None
        reads = []
        for classifier in classifiers:
            reads.append(_read(classifier, texts, pairs, tokens_per_pack=tokens_per_pack))
        yield _Chunk(rows=chunk, reads=reads)


def _read(
    classifier: Classifier, texts: list[str], pairs: list[str] | None, *, tokens_per_pack: int
) -> _Read:
    """Tokenise a chunk's texts and lay them into packs."""
    examples = classifier.tokenizer.encode(texts, pairs)
    packs = list(evaluation_packs(examples, tokens_per_pack=tokens_per_pack))
    return _Read(examples=examples, packs=packs)


def answers_of(
    classifier: Classifier,
    texts: list[str],
    pairs: list[str] | None,
    *,
    tokens_per_pack: int = PredictConfig.tokens_per_pack,
) -> list[Answer]:
    """What `predict` would write of texts that are in memory.

    Args:
        classifier: The model.
        texts: In any number; chunks are as in `predict`, so that every bit is.
        pairs: Their second texts; None where the model reads single ones.
        tokens_per_pack: Most tokens in one forward pass.

    Raises:
        UserError: The model gives scores that are not finite.
    """
    answers: list[Answer] = []
    for start in range(0, len(texts), ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        read = _read(
            classifier,
            texts[rows],
            None if pairs is None else pairs[rows],
            tokens_per_pack=tokens_per_pack,
        )
        logits_NC = _logits_NC(classifier, read)
        answers += classifier.kind.answers(logits_NC, classifier.labels, classifier.decisions)
    return answers


def _with_chances(classifier: Classifier) -> Sequence[str]:
    """The labels that get a probability."""
    return classifier.labels if classifier.kind.has_chances else ()


def _logits_NC(classifier: Classifier, read: _Read) -> Tensor:
    """Scores of each row of a chunk, in the rows' order."""
    logits_WC = torch.empty(len(read.examples), len(classifier.labels))
    for rows, batch in read.packs:
        logits_WC[torch.tensor(rows)] = classifier.logits_NC(batch)
    return classifier.merged(logits_WC, read.examples)
