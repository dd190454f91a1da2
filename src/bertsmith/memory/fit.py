"""Ways to make a run fit: what each needs, and what it costs in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bertsmith.memory.formula import MemoryPlan, plan_memory
from bertsmith.memory.shapes import Adapters, NumberFormat, RunShape, Sharing
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import LORA_DEFAULT_TARGETS

STEP = 64
"""Sizes of packs are tried in multiples of so many tokens."""

MOST_TOKENS = 1 << 20
"""No pack is larger."""

FSDP_RANKS = (2, 4, 8)

LORA_RANK = 8
"""Of the LoRA that is advised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run with less memory."""

    what: str
    options: str
    """What to add to the command line."""

    plan: MemoryPlan
    fits: bool
    largest_tokens_per_pack: int | None
    """With which it still fits; None: not even the longest sequence does."""

    time_factor: float
    """Time of a step over that of the run as it is; on several devices, of all of them together."""

    note: str = ""


def largest_pack(shape: RunShape, limit_bytes: int) -> int | None:
    """Most tokens a pack may have so that the run fits; None if the longest sequence does not."""

    def fits(tokens: int) -> bool:
        return plan_memory(shape.with_tokens(tokens)).needed_bytes <= limit_bytes

    least = -(-shape.longest // STEP) * STEP
    if not fits(least):
        return shape.longest if fits(shape.longest) else None
    below, above = least // STEP, MOST_TOKENS // STEP + 1
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle * STEP):
            below = middle
        else:
            above = middle
    return below * STEP


def halved(tokens: int, smallest: int) -> int | None:
    """The next smaller pass; None where it is the smallest already."""
    return max(tokens // 2, smallest) if tokens > smallest else None


def smaller_passes(shape: RunShape, *, smallest: int | None = None) -> Iterator[RunShape]:
    """The run in whole packs, then in passes of half the size, of a quarter, and so on.

    A run whose passes do not fit goes down the same ladder. It has few rungs, so that the same run
    on a machine with a little more or less to spare is the same to the bit.

    Args:
        shape: Of whole packs.
        smallest: Tokens of the smallest pass; None: the longest sequence.
    """
    tokens: int | None = shape.tokens_per_pack
    while tokens is not None:
        yield shape.in_passes(tokens)
        tokens = halved(tokens, shape.longest if smallest is None else smallest)


def auto_passes(
    shape: RunShape, limit_bytes: int, *, smallest: int | None = None
) -> RunShape | None:
    """What `--micro_batch auto` comes to: the run in the largest passes that safely fit.

    Args:
        shape: Of whole packs.
        limit_bytes: What the device has.
        smallest: As `smaller_passes`.

    Returns:
        None if no pass is small enough.
    """
    for one in smaller_passes(shape, smallest=smallest):
        if plan_memory(one).safe_bytes <= limit_bytes:
            return one
    return None


def ways_to_fit(
    shape: RunShape,
    limit_bytes: int,
    *,
    step_tokens: int,
    speedup: float | None,
    half: NumberFormat,
) -> list[Way]:
    """The ways there are for a run, in the order in which to try them.

    Args:
        shape: The run as it is.
        limit_bytes: The device's memory.
        step_tokens: Tokens behind one update, which every way keeps.
        speedup: How much faster the device multiplies in a 16-bit format; None: it does not.
        half: That format.
    """
    ways = []
    # A second pass adds to the gradients of the first, which then have to be held meanwhile.
    tokens = largest_pack(replace(shape, packs_per_step=max(shape.packs_per_step, 2)), limit_bytes)
    smaller = min(tokens, shape.tokens_per_pack) if tokens is not None else shape.longest
    packs = -(-step_tokens // smaller)
    ways.append(
        _way(
            "smaller passes, the same step",
            f"--micro_batch {smaller}",
            replace(shape.with_tokens(smaller), packs_per_step=packs),
            limit_bytes,
            1.0,
            f"{packs} passes a step; --micro_batch auto finds the like",
        )
    )
    if shape.number_format == "fp32" and speedup is not None:
        changed = replace(shape, number_format=half)
        ways.append(_way(half, f"--precision {half}", changed, limit_bytes, 1.0 / speedup))
    for mode in _modes(shape):
        changed = replace(shape, block_modes=(mode,) * shape.encoder.num_hidden_layers)
        ways.append(
            _way(
                f"{mode} checkpointing",
                f"--checkpointing {mode}",
                changed,
                limit_bytes,
                1.0 + again_share(changed) - again_share(shape),
            )
        )
    if shape.task == "classifier" and shape.adapters is None and shape.head_norm == "none":
        ways.append(_of_adapters(shape, limit_bytes))
    if shape.sharing != "fsdp" and shape.adapters is None:
        for ranks in FSDP_RANKS:
            packs = -(-step_tokens // (shape.tokens_per_pack * ranks))
            changed = replace(shape, sharing="fsdp", ranks=ranks, packs_per_step=packs)
            ways.append(
                _way(
                    f"fsdp over {ranks}",
                    f"--parallel.strategy fsdp --parallel.devices {ranks}",
                    changed,
                    limit_bytes,
                    1.0,
                    f"on {ranks} devices; parameters travel in every pass",
                )
            )
    return ways


def _of_adapters(shape: RunShape, limit_bytes: int) -> Way:
    """LoRA as it is by default, on a base whose pooler is new.

    Time: of a pass's three products, that for gradients of weights is not made. On a CPU the
    kernels know no adapters, and nothing is won.
    """
    adapters = Adapters(rank=LORA_RANK, targets=LORA_DEFAULT_TARGETS)
    sharing: Sharing = "ddp" if shape.ranks > 1 else "none"
    changed = replace(shape, adapters=adapters, trained_rows=None, sharing=sharing)
    return _way(
        f"LoRA of rank {LORA_RANK}",
        f"--lora.rank {LORA_RANK}",
        changed,
        limit_bytes,
        2.0 / 3.0 if shape.device == "cuda" else 1.0,
        "trains additions to a frozen encoder: another result",
    )


def least_needed(shape: RunShape, *, formats: Sequence[NumberFormat]) -> MemoryPlan:
    """The least that one device can do with: the shortest packs, all blocks computed again."""
    mode: BlockMode = "full"
    modes = (mode,) * shape.encoder.num_hidden_layers
    small = replace(shape.with_tokens(shape.longest), block_modes=modes)
    plans = [plan_memory(replace(small, number_format=name)) for name in formats]
    return min(plans, key=lambda plan: plan.needed_bytes)


def again_share(shape: RunShape) -> float:
    """Work that is done again in the backward pass, as a share of a step's without.

    Full: all of a block but its last product. Selective: the product before the activation, and
    what takes hardly any time. The head's work and the last block's fewer rows are left out.
    """
    encoder = shape.encoder
    width, inner = encoder.hidden_size, encoder.intermediate_size
    attention = 4.0 * width * shape.longest
    whole = 2.0 * (4.0 * width * width + 2.0 * width * inner) + attention
    again = {
        "none": 0.0,
        "selective": 2.0 * width * inner,
        "full": whole - 2.0 * width * inner,
    }
    return sum(again[mode] for mode in shape.modes) / (3.0 * whole * len(shape.modes))


def _modes(shape: RunShape) -> Iterator[BlockMode]:
    present = set(shape.modes)
    if present == {"none"}:
        yield "selective"
    if present != {"full"}:
        yield "full"


def _way(
    what: str, options: str, shape: RunShape, limit_bytes: int, factor: float, note: str = ""
) -> Way:
    plan = plan_memory(shape)
    return Way(
        what=what,
        options=options,
        plan=plan,
        fits=plan.needed_bytes <= limit_bytes,
        largest_tokens_per_pack=largest_pack(shape, limit_bytes),
        time_factor=factor,
        note=note,
    )
