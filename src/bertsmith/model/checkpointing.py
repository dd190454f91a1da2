"""Which blocks are computed again in the backward pass, and what each way keeps of them.

Imports neither torch nor numpy, so that help, checks and plans are instant.

Per token and block, with D the width, F the inner width and H the heads, in elements:

| what                     | none    | selective | full | made again by                       |
|--------------------------|---------|-----------|------|-------------------------------------|
| input, D                 | kept    | kept*     | kept*| the norm it came from               |
| queries, keys, values, 3D| kept    | kept      | -    | a product, D x 3D                   |
| attention output, D      | kept    | kept      | -    | attention                           |
| sum before the norm, D   | kept    | kept      | -    | a product, D x D, dropout, addition |
| norm, D                  | kept    | -         | -    | the norm                            |
| inner layer, F           | kept    | -         | -    | a product, D x F                    |
| activation, F            | - (torch: kept) | - | -    | the activation                      |
| sum before last norm, D  | kept    | kept      | kept | (a product, F x D: never needed)    |
| probabilities, dropout   | - (torch: kept) | - (torch: dropout of sums) | - | their functions |

* On the C kernels a block that computes again takes its input from the sum before the last norm of
the block before, which that one keeps anyway: the input is one tensor less.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bertsmith.model.config import EncoderConfig

BlockMode = Literal["none", "selective", "full"]
"""What a block keeps for its backward pass: all, the outputs dear to compute, or one tensor."""

FORMS = "none, full, selective, every:N (N = 1, 2, ...) or budget:X (0 < X <= 1)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """What was asked for, read."""

    kind: Literal["none", "full", "selective", "every", "budget"]

    every: int = 1
    """Of `every`: each so many blocks one is computed again."""

    share: float = 1.0
    """Of `budget`: most that blocks may keep, as a share of what they keep without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """How blocks are computed, as far as it decides what they keep."""

    is_fused: bool
    """Whether on the C kernels (CPU, fp32 or bf16), or in plain torch."""

    element_bytes: int
    """Of the compute type: 4 for fp32, 2 for bf16 and fp16."""

    sequence_tokens: float = 0.0
    """E[s^2] / E[s] of the sequences' lengths s: plain torch keeps attention probabilities where
    they have a dropout."""


def parse_checkpointing(text: str) -> Checkpointing:
    """Read a value of `--checkpointing`.

    Args:
        text: One of `FORMS`.

    Raises:
        ValueError: It is none of them, or a number in it is out of range.
    """
    name, colon, number = text.partition(":")
    if "," in text or "+" in text:
        raise ValueError(f"checkpointing is {text!r}; modes do not combine, give one of {FORMS}")
    if not colon and name in ("none", "full", "selective"):
        return Checkpointing(kind=name)  # type: ignore[arg-type]
    if name == "every" and number.isascii() and number.isdecimal() and int(number) >= 1:
        return Checkpointing(kind="every", every=int(number))
    if name == "budget":
        try:
            share = float(number)
        except ValueError:
            share = 0.0
        if 0.0 < share <= 1.0:
            return Checkpointing(kind="budget", share=share)
    raise ValueError(f"checkpointing is {text!r}; it must be {FORMS}")


def block_modes(asked: Checkpointing, shape: EncoderConfig, body: Body) -> tuple[BlockMode, ...]:
    """The mode of each block, first to last.

    A budget is met with the least computed again: blocks become selective first, which saves most
    for its cost where products are what takes time (0.49 of what is kept for 8 % of a step's
    products and kernels, against 0.91 for 19 %; docs/experiments.md), and then full.

    Args:
        asked: What was asked for.
        shape: The encoder's.
        body: How its blocks are computed.

    Raises:
        ValueError: No block would be computed again, or the budget cannot be met.
    """
    count = shape.num_hidden_layers
    match asked.kind:
        case "none" | "full" | "selective":
            same: tuple[BlockMode, ...] = (asked.kind,) * count
            return same
        case "every":
            if asked.every > count:
                raise ValueError(
                    f"the model has {count} blocks, so none would be computed again; give at most "
                    f"every:{count}, or none"
                )
            kept: BlockMode = "none"
            again: BlockMode = "full"
            return tuple(kept if i % asked.every else again for i in range(1, count + 1))
        case "budget":
            return _within(asked.share, shape, body)


def _within(share: float, shape: EncoderConfig, body: Body) -> tuple[BlockMode, ...]:
    """The cheapest modes within a share; blocks at the end come last, since they may read fewer."""
    count = shape.num_hidden_layers
    modes: list[BlockMode] = ["none"] * count
    chosen: tuple[BlockMode, BlockMode] = ("selective", "full")
    for mode, i in itertools.product(chosen, range(count)):
        if kept_share(shape, modes, body) <= share:
            break
        modes[i] = mode
    least = kept_share(shape, modes, body)
    if least > share:
        # Rounded up, so that what is advised can be had.
        advised = -(-least * 1000 // 1) / 1000
        raise ValueError(
            f"this model's blocks keep at least {advised:g} of their activations; give "
            f"budget:{advised:g} or more"
        )
    return tuple(modes)


def kept_share(shape: EncoderConfig, modes: Sequence[BlockMode], body: Body) -> float:
    """What blocks keep, as a share of what they keep without checkpointing.

    The last block may read all tokens or hardly any, which the data decide: the larger share of
    the two ends counts, and any between them is smaller.
    """
    none: list[BlockMode] = ["none"] * len(modes)
    return max(
        kept_bytes(shape, modes, body, read_share=read)
        / kept_bytes(shape, none, body, read_share=read)
        for read in (0.0, 1.0)
    )


def kept_bytes(
    shape: EncoderConfig, modes: Sequence[BlockMode], body: Body, *, read_share: float = 1.0
) -> float:
    """Bytes that all blocks together keep for the backward pass, per packed token, in training.

    The embeddings' output is counted, being the first block's input; parameters are not, nor the
    copies of weights that bf16 on the C kernels keeps for blocks of mode none.

    Args:
        shape: The encoder's.
        modes: Of the blocks, first to last.
        body: How they are computed.
        read_share: Share of tokens whose output is wanted of the last block: of masked language
            modelling the masked, of a classifier one a sequence.
    """
    last = len(modes) - 1
    total = 0.0
    for i, mode in enumerate(modes):
        is_from_norm = body.is_fused and mode != "none" and i > 0
        total += 0.0 if is_from_norm else _input_bytes(shape, mode, body)
        every, read = _bytes_of(shape, mode, body)
        total += every + read * (read_share if i == last else 1.0)
    return total


def kept_bytes_per_token(shape: EncoderConfig, mode: BlockMode, body: Body) -> float:
    """Bytes that a block amid blocks of its own mode keeps for the backward pass, per token."""
    every, read = _bytes_of(shape, mode, body)
    is_from_norm = body.is_fused and mode != "none"
    return every + read + (0.0 if is_from_norm else _input_bytes(shape, mode, body))


def _input_bytes(shape: EncoderConfig, mode: BlockMode, body: Body) -> float:
    """A block's input: in the compute type; where plain torch starts anew from it, in fp32."""
    starts_anew = not body.is_fused and mode == "full"
    return shape.hidden_size * (4 if starts_anew else body.element_bytes)


def _bytes_of(shape: EncoderConfig, mode: BlockMode, body: Body) -> tuple[float, float]:
    """What a block keeps besides its input: per token, and per token that is read."""
    width, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    size = body.element_bytes
    moments = 8  # of a norm: mean and 1/deviation, fp32
    sums = width * (size if body.is_fused else 4)  # plain torch adds and normalises in fp32
    masks = 0 if body.is_fused or shape.hidden_dropout_prob == 0.0 else width
    before_last_norm = sums + moments + masks
    if mode == "full":
        return 0.0, before_last_norm
    projections, query, context = 2.0 * width * size, width * size, width * size
    if body.is_fused:
        read = query + context + 4 * heads + sums + moments
        if mode == "none":
            read += (width + inner) * size
        return projections, read + before_last_norm
    # Queries are made for all tokens; what attention keeps is for all of them, too.
    every = projections + query
    if shape.attention_probs_dropout_prob == 0.0:
        every += context + 4 * heads
    elif mode == "none":
        every += body.sequence_tokens * heads * (4 + 1 + size)
    read = context + masks + sums + moments
    if mode == "none":
        activations = 1 if shape.hidden_act == "relu" else 2
        read += width * size + activations * inner * size
    return every, read + before_last_norm
