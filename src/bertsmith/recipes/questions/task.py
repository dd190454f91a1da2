"""What stands beside the weights of a model that finds answers, and the model loaded from there.

Shape legend: R windows, Q questions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch
from bertsmith.data.examples import labelled_batch, packs_by_length
from bertsmith.data.questions.question import Question
from bertsmith.data.questions.windows import QuestionTokenizer, QuestionWindows
from bertsmith.data.windows import WindowConfig
from bertsmith.errors import UserError
from bertsmith.hf import load_span_model
from bertsmith.model.span_model import SpanModel, span_nats
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import Device
from bertsmith.recipes.model_folder import fitting_tokenizer
from bertsmith.recipes.opening import open_model
from bertsmith.recipes.questions.data import longest_window, overlap_of_windows
from bertsmith.recipes.task_file import (
    check_task,
    count_in,
    longest_in,
    overlap_in,
    read_task_file,
    scores_in,
    write_task_file,
)
from bertsmith.tasks.answer_scan import SCAN_COLUMNS, Found, merge_scans, scan_windows
from bertsmith.tasks.config import AnswerConfig
from bertsmith.tasks.questions import Answering, FoundAnswer, answers_of
from bertsmith.train.config import Precision
from bertsmith.train.precision import Compute, choose_compute

NATS = SCAN_COLUMNS
"""Column of a window's loss, after those of its scan."""

NUM_COLUMNS = SCAN_COLUMNS + 1


@dataclass(frozen=True, kw_only=True)
class AnswerTask:
    """How a model was trained to answer; stands beside its weights in `bertsmith.json`."""

    max_sequence_tokens: int
    overlap_tokens: int
    max_answer_tokens: int
    null_threshold: float | None
    """No answer is said if it scores more than the best span by more than this; None: never."""

    step: int
    scores: Mapping[str, float]

    def write(self, folder: Path) -> None:
        """Put the file into a model folder."""
        write_task_file(folder, Answering.name, asdict(self))


def read_answer_task(folder: Path) -> AnswerTask | None:
    """The task of a model's folder; None if it is not one of ours.

    Raises:
        UserError: The file is damaged.
    """
    return read_task_file(folder, _as_task)


def _as_task(content: Mapping[str, Any]) -> AnswerTask:
    check_task(content, Answering.name)
    threshold = None if content["null_threshold"] is None else float(content["null_threshold"])
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"null_threshold is {threshold}")
    return AnswerTask(
        max_sequence_tokens=longest_in(content),
        overlap_tokens=overlap_in(content),
        max_answer_tokens=count_in(content, "max_answer_tokens", least=1),
        null_threshold=threshold,
        step=count_in(content, "step"),
        scores=scores_in(content),
    )


@torch.no_grad()
def scan_pack(
    model: SpanModel,
    batch: LabelledBatch,
    contexts_R: Tensor,
    *,
    max_answer_tokens: int,
    compute: Compute,
) -> Tensor:
    """What a pack's windows say without dropout, and their loss; float64, on the CPU.

    As `scan_windows`, with a column more: the loss in nats, mean of both ends.
    """
    inputs = batch.inputs.to(compute.device)
    with compute.autocast():
        logits_T2 = model.logits_T2(inputs, dropout_seed=None)
    logits_T2 = logits_T2.float().cpu()
    if not bool(torch.isfinite(logits_T2).all()):
        return not_finite(len(contexts_R))
    nats_R = span_nats(logits_T2, batch.inputs.starts_N1, batch.labels_N).double().mean(1)
    scans_R5 = scan_windows(
        logits_T2, batch.inputs.starts_N1, contexts_R, max_answer_tokens=max_answer_tokens
    )
    return torch.cat([scans_R5, nats_R[:, None]], 1)


def not_finite(num_windows: int) -> Tensor:
    """What windows say of which a score is not finite: nothing that could be mistaken."""
    return torch.full((num_windows, NUM_COLUMNS), torch.nan, dtype=torch.float64)


def found_in_windows(scans_R6: Tensor, windows: QuestionWindows) -> tuple[Found, list[float]]:
    """What windows say together, and the loss of each question's, summed.

    Raises:
        FloatingPointError: A score of the model is not finite.
    """
    if bool(scans_R6.isnan().any()):
        raise FloatingPointError("the model gives scores that are not finite (NaN or infinity)")
    owners_R = windows.examples.owners_N
    found = merge_scans(scans_R6[:, :SCAN_COLUMNS], owners_R, windows.contexts_R, windows.pieces_R)
    nats_Q = owners_R.bincount(weights=scans_R6[:, NATS])
    return found, nats_Q.tolist()


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """A loaded model with all it needs to answer."""

    folder: Path
    model: SpanModel
    tokenizer: QuestionTokenizer
    max_answer_tokens: int
    null_threshold: float | None
    is_ours: bool
    """Whether it was trained here, so that its threshold is known."""

    compute: Compute

    def find(self, windows: QuestionWindows, *, tokens_per_pack: int) -> tuple[Found, list[float]]:
        """What is found in the windows of some questions, and the loss of each one's, summed.

        Raises:
            UserError: A score is not finite: the weights are broken.
        """
        examples = windows.examples
        scans_R6 = torch.empty(len(examples), NUM_COLUMNS, dtype=torch.float64)
        packs = packs_by_length(
            examples.lengths_N, range(len(examples)), tokens_per_pack=tokens_per_pack
        )
        for batch in ahead(labelled_batch(examples, windows.places_R2, rows) for rows in packs):
            scans_R6[batch.rows_N] = scan_pack(
                self.model,
                batch,
                windows.contexts_R[batch.rows_N],
                max_answer_tokens=self.max_answer_tokens,
                compute=self.compute,
            )
        try:
            return found_in_windows(scans_R6, windows)
        except FloatingPointError as error:
            raise UserError(f"{self.folder}: {error}") from error

    def answer(
        self, questions: Sequence[Question], *, tokens_per_pack: int
    ) -> tuple[list[FoundAnswer], int]:
        """What is said to each question, and how many questions lost their end."""
        windows = self.tokenizer.windows(self.tokenizer.read(questions))
        found, _ = self.find(windows, tokens_per_pack=tokens_per_pack)
        said = answers_of(found, windows, questions, null_threshold=self.null_threshold)
        return said, windows.num_cut


def open_answerer(
    where: str,
    *,
    adapter: str | None = None,
    max_sequence_tokens: int | None,
    precision: Precision,
    device: Device,
) -> Answerer:
    """Load a model that finds answers, ours or one of transformers.

    Args:
        where: A model folder, a run folder or a hub name.
        adapter: Folder of an adapter to merge into it, which then says the task; None: none.
        max_sequence_tokens: Of a window; None: as in fine-tuning, or else the model's limit.
        precision: Of the forward pass.
        device: Where to run it.

    Raises:
        UserError: It finds no answers, or its tokenizer is missing or does not fit; or the adapter
            cannot be read, or is for another base.
    """
    compute = choose_compute(precision, device)
    found = open_model(where, _load, read_answer_task, kind=SpanModel, adapter=adapter)
    shape, task = found.model.encoder.config, found.task
    longest = longest_window(found.longest(max_sequence_tokens), shape, where=found.folder)
    is_as_trained = task is not None and longest == task.max_sequence_tokens
    window = WindowConfig(overlap_tokens=task.overlap_tokens if task and is_as_trained else None)
    return Answerer(
        folder=found.folder,
        model=found.model.to(compute.device).eval(),
        tokenizer=QuestionTokenizer(
            fitting_tokenizer(found.folder, shape),
            max_sequence_tokens=longest,
            overlap_tokens=overlap_of_windows(window, longest),
        ),
        max_answer_tokens=AnswerConfig().max_tokens if task is None else task.max_answer_tokens,
        null_threshold=None if task is None else task.null_threshold,
        is_ours=task is not None,
        compute=compute,
    )


def _load(folder: Path) -> tuple[SpanModel, tuple[str, ...]]:
    return load_span_model(folder, is_ready=True)[0], ()
