"""A fine-tuned classifier in use: what `evaluate` and `predict` share.

A model folder is Hugging Face's, plus `bertsmith.json`: which columns the model was trained on
and how long its texts may be. Without it (a model from elsewhere) the table decides.

Shape legend: N sequences, C classes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from bertsmith.batch import PackedBatch
from bertsmith.data.columns import UsualColumns
from bertsmith.data.examples import Examples, ExampleTokenizer
from bertsmith.data.windows import WindowConfig, overlap_unless_cut
from bertsmith.errors import UserError
from bertsmith.hf import load_classifier, read_labels
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.objectives import ProblemType
from bertsmith.recipes.config import Device
from bertsmith.recipes.model_folder import (
    fitting_tokenizer,
    longest_example,
)
from bertsmith.recipes.opening import open_model
from bertsmith.recipes.task_file import (
    count_in,
    longest_in,
    overlap_in,
    read_task_file,
    scores_in,
    write_task_file,
)
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.kind import TaskKind
from bertsmith.tasks.kinds import kind_of
from bertsmith.tasks.windows import Merge
from bertsmith.train.config import Precision
from bertsmith.train.precision import Compute, choose_compute


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a classifier was trained to read; stands beside its weights."""

    columns: UsualColumns
    """Names of its columns."""

    max_sequence_tokens: int
    """Longest example in training."""

    step: int
    """Optimizer steps behind the weights."""

    scores: Mapping[str, float]
    """How the weights did on the examples they were judged by, by metric."""

    problem_type: ProblemType = "single_label_classification"
    """As in `config.json`."""

    overlap_tokens: int | None = None
    """That the windows of a longer text share; None: such a text is cut."""

    merge: Merge = "mean"
    """How windows give one answer."""

    label_separator: str | None = None
    """What stood between the labels of a text in its training table."""

    decisions: object = None
    """How scores become answers, as `Decisions.as_json` writes it; None: plainly."""

    def write(self, folder: Path) -> None:
        """Put the file into a model folder."""
        values = asdict(self)
        write_task_file(folder, values.pop("problem_type"), values)


def read_task(folder: Path) -> Task | None:
    """The task of a model folder; None if it is not one of ours.

    Raises:
        UserError: The file is damaged.
    """
    return read_task_file(folder, _as_task)


def _as_task(content: Mapping[str, Any]) -> Task:
    columns = content["columns"]
    return Task(
        columns=UsualColumns(
            text=str(columns["text"]),
            pair=None if columns["pair"] is None else str(columns["pair"]),
            label=str(columns["label"]),
            labels=tuple(map(str, columns.get("labels") or ())),
        ),
        max_sequence_tokens=longest_in(content),
        step=count_in(content, "step"),
        scores=scores_in(content),
        problem_type=_problem_type(content),
        overlap_tokens=None if content.get("overlap_tokens") is None else overlap_in(content),
        merge="max" if content.get("merge") == "max" else "mean",
        label_separator=content.get("label_separator"),
        decisions=content.get("decisions"),
    )


def _problem_type(content: Mapping[str, Any]) -> ProblemType:
    known: tuple[ProblemType, ...] = get_args(ProblemType)
    for name in known:
        if content["task"] == name:
            return name
    raise ValueError(f"task is {content['task']!r}, which is none of whole texts")


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A loaded model with all it needs to read texts."""

    folder: Path
    model: SequenceClassifier
    labels: tuple[str, ...]
    tokenizer: ExampleTokenizer
    task: Task | None
    kind: TaskKind[Any]
    decisions: Decisions
    merge: Merge
    """How the windows of a text give one answer."""

    compute: Compute

    @property
    def is_pair(self) -> bool | None:
        """Whether it reads pairs; None: not known."""
        return None if self.task is None else self.task.columns.pair is not None

    @property
    def usual(self) -> UsualColumns | None:
        """Names of the columns it was trained on."""
        return None if self.task is None else self.task.columns

    def merged(self, logits_WC: Tensor, examples: Examples) -> Tensor:
        """Scores of each row, N x C, from those of its windows."""
        return self.kind.merged(logits_WC, examples.owners_N, merge=self.merge)

    def logits_NC(self, batch: PackedBatch) -> Tensor:
        """Scores of a pack's sequences, fp32, on the CPU.

        Raises:
            UserError: A score is not finite: the weights are broken.
        """
        scores_NC = logits_NC(self.model, batch, self.compute)
        if not bool(torch.isfinite(scores_NC).all()):
            raise UserError(f"{self.folder}: the model gives scores that are not finite (NaN)")
        return scores_NC


@torch.no_grad()
def logits_NC(
    model: SequenceClassifier | SentenceEmbedder, batch: PackedBatch, compute: Compute
) -> Tensor:
    """Scores of a pack's sequences without dropout, fp32, on the CPU."""
    with compute.autocast():
        scores_NC = model.logits_NC(batch.to(compute.device), dropout_seed=None)
    return scores_NC.float().cpu()


def open_classifier(
    where: str,
    *,
    adapter: str | None = None,
    max_sequence_tokens: int | None,
    precision: Precision,
    device: Device,
) -> Classifier:
    """Load a fine-tuned model, ready to read texts.

    Args:
        where: A model folder, a run folder or a hub name.
        adapter: Folder of an adapter to merge into it, which then says the task; None: none.
        max_sequence_tokens: Longest example; None: as in fine-tuning, or else the model's limit.
        precision: Of the forward pass.
        device: Where to run it.

    Raises:
        UserError: It is no classifier, or its tokenizer is missing or does not fit; or the adapter
            cannot be read, or is for another base.
    """
    compute = choose_compute(precision, device)
    found = open_model(where, _load, read_task, kind=SequenceClassifier, adapter=adapter)
    config, task = found.model.encoder.config, found.task
    tokenizer = fitting_tokenizer(found.folder, config).tokenizer
    is_pair = task is not None and task.columns.pair is not None
    longest = longest_example(
        found.longest(max_sequence_tokens), config.max_position_embeddings, is_pair=is_pair
    )
    if task is not None and max_sequence_tokens is None:
        overlap = task.overlap_tokens
    else:
        overlap = overlap_unless_cut(
            WindowConfig(),
            asked_longest=max_sequence_tokens,
            longest=longest,
            num_special=tokenizer.num_special_tokens_to_add(is_pair),
        )
    return Classifier(
        folder=found.folder,
        model=found.model.to(compute.device).eval(),
        labels=found.labels,
        tokenizer=ExampleTokenizer(tokenizer, max_sequence_tokens=longest, overlap_tokens=overlap),
        task=task,
        kind=kind_of(
            found.model.objective.problem_type,
            label_separator=None if task is None else task.label_separator,
        ),
        decisions=Decisions()
        if task is None
        else Decisions.from_json(task.decisions, found.labels, where=str(found.task_file)),
        merge="mean" if task is None else task.merge,
        compute=compute,
    )


def _load(folder: Path) -> tuple[SequenceClassifier, tuple[str, ...]]:
    model, _ = load_classifier(folder, labels=None)
    return model, read_labels(folder, num_labels=model.classifier.out_features)
