"""What stands beside the weights of a tagger, and the tagger loaded from there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.batch import MaskedBatch
from bertsmith.data.tagging.windows import FRAME_TOKENS, Windows, WindowTokenizer
from bertsmith.data.windows import WindowConfig, overlap_of
from bertsmith.errors import UserError
from bertsmith.hf import load_token_classifier, read_labels
from bertsmith.model.token_classifier import TokenClassifier
from bertsmith.recipes.ahead import ahead
from bertsmith.recipes.config import Device
from bertsmith.recipes.model_folder import (
    fitting_tokenizer,
    longest_example,
)
from bertsmith.recipes.opening import open_model
from bertsmith.recipes.task_file import (
    check_task,
    count_in,
    longest_in,
    overlap_in,
    read_task_file,
    scores_in,
    write_task_file,
)
from bertsmith.tasks.tagging import Tagging
from bertsmith.train.config import Precision
from bertsmith.train.precision import Compute, choose_compute


@dataclass(frozen=True, kw_only=True)
class TaggingTask:
    """How a tagger was trained to read; stands beside its weights in `bertsmith.json`."""

    max_sequence_tokens: int
    overlap_tokens: int
    step: int
    scores: Mapping[str, float]

    def write(self, folder: Path) -> None:
        """Put the file into a model folder."""
        write_task_file(folder, Tagging.name, asdict(self))


def read_tagging_task(folder: Path) -> TaggingTask | None:
    """The task of a tagger's folder; None if it is not one of ours.

    Raises:
        UserError: The file is damaged.
    """
    return read_task_file(folder, _as_task)


def _as_task(content: Mapping[str, Any]) -> TaggingTask:
    check_task(content, Tagging.name)
    return TaggingTask(
        max_sequence_tokens=longest_in(content),
        overlap_tokens=overlap_in(content),
        step=count_in(content, "step"),
        scores=scores_in(content),
    )


@dataclass(frozen=True, kw_only=True)
class Tagger:
    """A loaded model with all it needs to read sentences."""

    folder: Path
    model: TokenClassifier
    labels: tuple[str, ...]
    tokenizer: WindowTokenizer
    kind: Tagging
    compute: Compute

    def logits_WC(self, windows: Windows, *, tokens_per_pack: int) -> Tensor:
        """Scores of every word, fp32, on the CPU.

        Raises:
            UserError: A score is not finite: the weights are broken.
        """
        logits_WC = torch.empty(len(windows.positions_W), len(self.labels))
        packs = windows.packs(tokens_per_pack=tokens_per_pack)
        no_tags_W = torch.zeros_like(windows.positions_W)
        for batch, words_M in ahead(windows.batch(rows, no_tags_W) for rows in packs):
            logits_WC[words_M] = logits_MC(self.model, batch, self.compute)
        if not bool(torch.isfinite(logits_WC).all()):
            raise UserError(f"{self.folder}: the model gives scores that are not finite (NaN)")
        return logits_WC


@torch.no_grad()
def logits_MC(model: TokenClassifier, batch: MaskedBatch, compute: Compute) -> Tensor:
    """Scores of a pack's words without dropout, fp32, on the CPU."""
    batch = batch.to(compute.device)
    with compute.autocast():
        scores_MC = model.logits_MC(batch.inputs, batch.positions_M, dropout_seed=None)
    return scores_MC.float().cpu()


def open_tagger(
    where: str,
    *,
    adapter: str | None = None,
    max_sequence_tokens: int | None,
    precision: Precision,
    device: Device,
) -> Tagger:
    """Load a tagger, ready to read sentences.

    Args:
        where: A model folder, a run folder or a hub name.
        adapter: Folder of an adapter to merge into it, which then says the task; None: none.
        max_sequence_tokens: Of a window; None: as in fine-tuning, or else the model's limit.
        precision: Of the forward pass.
        device: Where to run it.

    Raises:
        UserError: It is no tagger, or its tokenizer is missing or does not fit; or the adapter
            cannot be read, or is for another base.
    """
    compute = choose_compute(precision, device)
    found = open_model(where, _load, read_tagging_task, kind=TokenClassifier, adapter=adapter)
    config, task = found.model.encoder.config, found.task
    tokenizer = fitting_tokenizer(found.folder, config)
    longest = longest_example(
        found.longest(max_sequence_tokens), config.max_position_embeddings, is_pair=False
    )
    is_as_trained = task is not None and longest == task.max_sequence_tokens
    window = WindowConfig(overlap_tokens=task.overlap_tokens if task and is_as_trained else None)
    overlap = overlap_of(window, longest=longest, num_special=FRAME_TOKENS)
    return Tagger(
        folder=found.folder,
        model=found.model.to(compute.device).eval(),
        labels=found.labels,
        tokenizer=WindowTokenizer(tokenizer, max_sequence_tokens=longest, overlap_tokens=overlap),
        kind=Tagging(has_spans=has_spans(found.labels)),
        compute=compute,
    )


def _load(folder: Path) -> tuple[TokenClassifier, tuple[str, ...]]:
    model, _ = load_token_classifier(folder, labels=None)
    return model, read_labels(folder, num_labels=model.classifier.out_features)


def has_spans(labels: Sequence[str]) -> bool:
    """Whether a model's tags are those of spans."""
    return "O" in labels and all(
        label == "O" or (label[:2] in ("B-", "I-") and len(label) > 2) for label in labels
    )
