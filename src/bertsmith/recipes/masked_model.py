"""A pretrained model in use: what `fill` and `score` share."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.batch import PackedBatch
from bertsmith.data.examples import ExampleTokenizer
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.errors import UserError
from bertsmith.hf import load_masked_lm
from bertsmith.model.heads import MaskedLM
from bertsmith.recipes.config import Device
from bertsmith.recipes.model_folder import fitting_tokenizer, model_folder
from bertsmith.train.config import Precision
from bertsmith.train.precision import Compute, choose_compute


@dataclass(frozen=True, kw_only=True)
class MaskedModel:
    """A loaded masked-language model with all it needs to read texts."""

    folder: Path
    model: MaskedLM
    tokenizer: TextTokenizer
    compute: Compute

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Ids of each text, special tokens included, int32.

        Raises:
            UserError: A text has more tokens than the model has positions.
        """
        limit = self.model.encoder.config.max_position_embeddings
        whole = ExampleTokenizer(self.tokenizer.tokenizer, max_sequence_tokens=sys.maxsize // 2)
        examples = whole.encode(texts, None)
        lengths: list[int] = examples.lengths_N.tolist()
        for number, length in enumerate(lengths, start=1):
            if length > limit:
                raise UserError(
                    f"text {number}: has {length:,} tokens, special ones included, where the model "
                    f"reads at most {limit:,}; shorten or split it"
                )
        return list(torch.split(examples.input_ids_T, lengths))

    @torch.no_grad()
    def logits_MV(self, batch: PackedBatch, positions_M: Tensor) -> Tensor:
        """Scores over the vocabulary at the given positions, ascending; fp32, on the CPU.

        Raises:
            UserError: A score is not finite: the weights are broken.
        """
        device = self.compute.device
        with self.compute.autocast():
            logits_MV = self.model.logits_MV(
                batch.to(device), positions_M.to(device), dropout_seed=None
            )
        if not bool(torch.isfinite(logits_MV).all()):
            raise UserError(f"{self.folder}: the model gives scores that are not finite (NaN)")
        return logits_MV.float().cpu()


def open_masked_model(where: str, *, precision: Precision, device: Device) -> MaskedModel:
    """Load a pretrained model, ready to read texts.

    Args:
        where: A model folder, a run folder or a hub name.
        precision: Of the forward pass.
        device: Where to run it.

    Raises:
        UserError: It has no whole masked-LM head, or its tokenizer is missing or does not fit.
    """
    folder = model_folder(where)
    model, report = load_masked_lm(folder, seed=0)
    if report.new:
        raise UserError(
            f"{folder}: holds no masked-LM head, so it cannot name hidden tokens; give a folder "
            "that `bertsmith pretrain` wrote"
        )
    compute = choose_compute(precision, device)
    return MaskedModel(
        folder=folder,
        model=model.to(compute.device).eval(),
        tokenizer=fitting_tokenizer(folder, model.encoder.config),
        compute=compute,
    )


def texts_of(texts: Sequence[str], data: str | None) -> list[str]:
    """The texts on the command line, or those of a file or standard input, one a line.

    Raises:
        UserError: There are none, both are given, or the file cannot be read.
    """
    if bool(texts) == (data is not None):
        raise UserError("give texts, or a file of texts with --data (one a line)")
    if data is None:
        return list(texts)
    try:
        raw = sys.stdin.buffer.read() if data == "-" else Path(data).read_bytes()
        lines = raw.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--data {data}: cannot be read ({reason})") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise UserError(f"--data {data}: holds no text")
    return found
