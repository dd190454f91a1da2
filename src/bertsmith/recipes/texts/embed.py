"""A fine-tuned sentence embedder in use: `evaluate` and `predict` of a model of --task embedding.

`predict` writes one row of numbers a text, in the texts' order: a NumPy matrix (.npy, float32), or
JSONL with the key `embedding` beside the table's own.

Shape legend: N texts, D width.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.columns import UsualColumns
from bertsmith.data.examples import Examples, ExampleTokenizer, evaluation_packs
from bertsmith.data.tables import Row, TableReader
from bertsmith.errors import UserError
from bertsmith.hf import load_encoder
from bertsmith.hf.sentence import read_pooling
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import Device, PredictConfig
from bertsmith.recipes.model_folder import (
    fitting_tokenizer,
    longest_example,
    sole_adapter,
)
from bertsmith.recipes.opening import open_model
from bertsmith.recipes.predictions import PredictSummary, check_output, whole_file
from bertsmith.recipes.texts.task import Task, logits_NC, read_task
from bertsmith.train.config import Precision
from bertsmith.train.precision import Compute, choose_compute

ROWS_PER_CHUNK = 4096
EMBEDDING = "embedding"
"""The key of a text's numbers in JSONL."""


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """A loaded embedder with all it needs to read texts."""

    folder: Path
    model: SentenceEmbedder
    tokenizer: ExampleTokenizer
    task: Task | None
    compute: Compute

    def embed(self, examples: Examples, *, tokens_per_pack: int) -> Tensor:
        """Embeddings of all examples in their order, fp32, shape N x D.

        Raises:
            UserError: One is not finite: the weights are broken.
        """
        embeddings_ND = torch.empty(len(examples), self.model.num_outputs)
        for rows, batch in ahead(evaluation_packs(examples, tokens_per_pack=tokens_per_pack)):
            embeddings_ND[torch.tensor(rows)] = logits_NC(self.model, batch, self.compute)
        if not bool(torch.isfinite(embeddings_ND).all()):
            raise UserError(f"{self.folder}: the model gives embeddings that are not finite (NaN)")
        return embeddings_ND


def open_embedder(
    where: str,
    *,
    adapter: str | None = None,
    max_sequence_tokens: int | None,
    precision: Precision,
    device: Device,
) -> Embedder:
    """Load a model of embeddings, ours or one of sentence-transformers.

    Args:
        where: A model folder, a run folder or a hub name.
        adapter: Folder of an adapter to merge into it; None: none.
        max_sequence_tokens: Longest text; None: as in fine-tuning, or else the model's limit.
        precision: Of the forward pass.
        device: Where to run it.

    Raises:
        UserError: It cannot be used.
    """
    compute = choose_compute(precision, device)
    found = open_model(where, _load, read_task, kind=SentenceEmbedder, adapter=adapter)
    shape = found.model.encoder.config
    longest = longest_example(
        found.longest(max_sequence_tokens), shape.max_position_embeddings, is_pair=False
    )
    return Embedder(
        folder=found.folder,
        model=found.model.to(compute.device).eval(),
        tokenizer=ExampleTokenizer(
            fitting_tokenizer(found.folder, shape).tokenizer, max_sequence_tokens=longest
        ),
        task=found.task,
        compute=compute,
    )


def _load(folder: Path) -> tuple[SentenceEmbedder, tuple[str, ...]]:
    pooling = read_pooling(folder)
    if pooling is None:
        raise UserError(
            f"{folder}: gives no embeddings; run `bertsmith finetune --task embedding` first"
        )
    return SentenceEmbedder(load_encoder(folder)[0], pooling=pooling), ()


def predict_embeddings(config: PredictConfig) -> PredictSummary:
    """Embed every text of a table and write what comes of it.

    Raises:
        UserError: The model, the table or the output cannot be used. The output then does not
            exist, or is what it was.
    """
    source, output = Path(config.data), Path(config.output)
    if config.output == "-":
        raise UserError("--output: embeddings need a file that ends in .npy or .jsonl; name one")
    check_output(output, overwrite=config.overwrite, source=source, endings=(".npy", ".jsonl"))
    embedder = open_embedder(
        config.model,
        adapter=sole_adapter(config.adapter),
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    started_at_seconds = time.perf_counter()
    num_rows = num_cut = 0
    with TableReader(
        source,
        config.table,
        is_labelled=False,
        is_pair=False,
        usual=_one_text(embedder.task),
        keeps_columns=True,
        takes_lines=True,
    ) as reader:
        columns = reader.columns.names
        if EMBEDDING in columns and output.suffix.lower() == ".jsonl":
            raise UserError(
                f"{config.data}: a column {EMBEDDING!r} is there already; rename or remove it"
            )
        with _output(output, columns, width=embedder.model.num_outputs) as write:
            rows = iter(reader)
            while chunk := list(itertools.islice(rows, ROWS_PER_CHUNK)):
                examples = embedder.tokenizer.encode([row.text for row in chunk], None)
                write(chunk, embedder.embed(examples, tokens_per_pack=config.tokens_per_pack))
                num_rows += len(chunk)
                num_cut += examples.num_cut
    return PredictSummary(
        num_rows=num_rows,
        num_cut=num_cut,
        skipped_rows=reader.skipped_rows,
        seconds=time.perf_counter() - started_at_seconds,
        unread_column=None if config.table.text_column else reader.columns.second_text,
    )


Write = Callable[[Sequence[Row], Tensor], None]


@contextlib.contextmanager
def _output(path: Path, columns: Sequence[str], *, width: int) -> Iterator[Write]:
    if path.suffix.lower() == ".jsonl":
        with whole_file(path, option="output") as file:

            def write_lines(rows: Sequence[Row], embeddings_ND: Tensor) -> None:
                for row, numbers in zip(rows, embeddings_ND.tolist(), strict=True):
                    content = dict(zip(columns, row.values, strict=True))
                    content[EMBEDDING] = [float(f"{x:.8g}") for x in numbers]
                    file.write(json.dumps(content, ensure_ascii=False, default=str) + "\n")

            yield write_lines
        return
    with _matrix_file(path, width=width) as write_rows:
        yield lambda rows, embeddings_ND: write_rows(embeddings_ND)


@contextlib.contextmanager
def _matrix_file(path: Path, *, width: int) -> Iterator[Callable[[Tensor], None]]:
    """A .npy file of rows that come bit by bit, whole under its name or not at all.

    NumPy leaves room in a header for a first axis of any length, so that it can be written again
    when the number of rows is known.
    """
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    num_rows = 0
    try:
        with fresh.open("w+b") as file:

            def write_header() -> None:
                header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, header)

            def write(embeddings_ND: Tensor) -> None:
                nonlocal num_rows
                file.write(embeddings_ND.numpy().astype("<f4", copy=False).tobytes())
                num_rows += len(embeddings_ND)

            write_header()
            yield write
            write_header()
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
    finally:
        fresh.unlink(missing_ok=True)


def _one_text(task: Task | None) -> UsualColumns | None:
    """Where the first text of a training row stood: a table to embed has one text a row."""
    return None if task is None else replace(task.columns, pair=None)
