"""`bertsmith predict`: label the texts of a file or of standard input, in their order.

Rows are taken in chunks: tokenised and sorted by length inside a chunk, written back in the
table's order. Memory is bounded by a chunk whatever the file's size, and the next chunk is
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
from bertsmith.data.examples import Examples, evaluation_packs
from bertsmith.data.tables import Row, TableReader
from bertsmith.errors import UserError
from bertsmith.model.lora import share_equal
from bertsmith.recipes.classifier import Classifier, ahead, open_classifier
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.embed import is_embedder, predict_embeddings
from bertsmith.recipes.predictions import (
    Predicted,
    PredictSummary,
    check_columns,
    check_output,
    prediction_file,
)
from bertsmith.recipes.tagging.predict import predict_tags
from bertsmith.recipes.tagging.task import is_tagger
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


def main(config: PredictConfig) -> int:
    """Predict, and say on standard error what was done."""
    is_embedding = is_embedder(config.model, adapter=_first(config.adapter))
    summary = predict_embeddings(config) if is_embedding else predict(config)
    done = "embedded" if is_embedding else "labelled"
    rate = summary.num_rows / max(summary.seconds, 1e-9)
    notes = [f"{summary.num_rows:,} texts {done} in {summary.seconds:.1f} s ({rate:,.0f} a second)"]
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
    first_adapter = _first(config.adapter)
    if is_embedder(config.model, adapter=first_adapter):
        raise UserError(f"{config.model}: gives embeddings and no labels; use `predict_embeddings`")
    if is_tagger(config.model, adapter=first_adapter):
        return predict_tags(config)
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


def _first(adapters: Sequence[str]) -> str | None:
    return adapters[0] if adapters else None


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
