"""What a run's blocks keep for the backward pass: `--checkpointing` for the model at hand."""

from collections.abc import Sequence
from itertools import groupby

from bertsmith.errors import UserError
from bertsmith.model.checkpointing import (
    BlockMode,
    Body,
    block_modes,
    kept_share,
    parse_checkpointing,
)
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused import fused_library
from bertsmith.model.lora import has_adapters
from bertsmith.say import Say
from bertsmith.train.precision import Compute


def set_checkpointing(text: str, encoder: Encoder, compute: Compute, *, say: Say) -> None:
    """Tell each block what to keep.

    Args:
        text: Value of `--checkpointing`.
        encoder: On its device; not yet spread over ranks.
        compute: What it computes in.
        say: Told in a line what was chosen, unless that is none.

    Raises:
        UserError: The value does not fit the model.
    """
    body = body_of(encoder, compute)
    try:
        modes = block_modes(parse_checkpointing(text), encoder.config, body)
    except ValueError as error:
        raise UserError(f"--checkpointing {text}: {error}") from error
    encoder.checkpoint_blocks(modes)
    if any(mode != "none" for mode in modes):
        share = kept_share(encoder.config, modes, body)
        say(
            f"checkpointing {text}: {said_modes(modes)}; blocks keep at most {share:.0%} of their "
            "activations"
        )


def body_of(encoder: Encoder, compute: Compute) -> Body:
    """How the encoder's blocks are computed; their probabilities are left out."""
    is_fused = has_kernels(encoder, compute) and not has_adapters(encoder)
    return Body(is_fused=is_fused, element_bytes=compute.dtype.itemsize)


def has_kernels(encoder: Encoder, compute: Compute) -> bool:
    """Whether there are C kernels for the encoder as it is computed."""
    with compute.autocast():
        return fused_library(encoder.embeddings.token.weight) is not None


def said_modes(modes: Sequence[BlockMode]) -> str:
    """Runs of blocks of one mode, numbered from 1."""
    said = []
    for mode, run in groupby(range(len(modes)), key=modes.__getitem__):
        numbers = [i + 1 for i in run]
        first, last = numbers[0], numbers[-1]
        said.append(
            f"block{'' if first == last else 's'} {first}"
            + ("" if first == last else f"-{last}")
            + f" {mode}"
        )
    return ", ".join(said)
