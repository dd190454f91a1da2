"""One optimizer step, and the only place where a gradient is asked for.

The loss of a step is the mean over all its targets: losses travel as sums, the number of targets
(or the sum of their weights) is counted over all ranks before the first backward, and there is one
division. A loss of several means (hidden tokens and pairs, say) has a sum and a count for each of
them. Cutting a step into
more packs, or sharing it out over ranks, therefore changes nothing but rounding (transformers
scales such gradients wrongly: issue 47688).
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from bertsmith.batch import StepShare
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import AbandonedError, never
from bertsmith.train.guard import BadStepError
from bertsmith.train.micro_batch import (
    Cuttable,
    LoneOutOfMemoryError,
    OutOfMemoryError,
    Part,
    cut_packs,
    give_back_memory,
    is_out_of_memory,
)
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.whole_step import first_pass, sees_whole_step, with_gradients

SMALLEST_LOSS_SCALE = 2.0**-10
"""An fp16 gradient that overflows even at this scale is not finite for other reasons."""


class Batch(Cuttable, Protocol):
    """A pack with something to predict."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        ...

    @property
    def num_targets(self) -> int:
        """What is predicted; 0 in a filler."""
        ...

    @property
    def target_counts(self) -> tuple[float, ...]:
        """Targets of each sum of the loss, or their weights; every pack has as many sums."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same pack on a device."""
        ...


BatchT = TypeVar("BatchT", bound=Batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did."""

    step: int
    """Steps done, this one included."""

    loss: float
    """Nats a target, by weight, over the whole step; 0 if it had no target. Of several means their
    sum."""

    grad_norm: float
    """L2 norm of the gradient before clipping."""

    learning_rate: float
    num_targets: int
    """Of all sums together."""

    num_tokens: int
    """Real tokens."""

    idle_share: float
    """Work that ranks with fewer tokens had to wait for: 1 - mean / most tokens of a rank."""

    seconds: float
    """From asking for the step's packs to the end of the update."""

    is_applied: bool
    """False when there was nothing to learn, or fp16 overflowed and the step was skipped."""

    has_overflowed: bool
    """Whether it was fp16 that overflowed."""


@dataclass(frozen=True, kw_only=True)
class _Update:
    grad_norm: float
    is_applied: bool
    """False where fp16 overflowed, or there was nothing to learn."""


def dropout_seed_of(seed: int, *, step: int) -> int:
    """The dropout seed of a step: a pure function, the same on any machine.

    What tells its packs apart is `PackedBatch.first_row`.
    """
    digest = hashlib.blake2b(f"dropout/{seed}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train_step(
    strategy: Strategy,
    share: StepShare[BatchT],
    optimizer: AdamW,
    *,
    compute: Compute,
    scaler: torch.amp.GradScaler | None,
    step: int,
    seed: int,
    learning_rate: float,
    max_grad_norm: float | None,
    loss_limit: float = math.inf,
    stop_asked: Callable[[], bool] = never,
    micro_batch_tokens: int | None = None,
) -> StepReport:
    """Run the packs, then update once with the mean over all targets of all ranks.

    Args:
        strategy: Its model's parameters are the optimizer's; their gradients are empty before and
            after.
        share: This rank's packs of the step.
        optimizer: Updates the parameters.
        compute: Device and format of the forward pass.
        scaler: Scales the loss of an fp16 run; None for the others.
        step: Steps done before, from 0.
        seed: The run's; dropout follows from it, the step and a token's place in it.
        learning_rate: Of this update.
        max_grad_norm: L2 bound on the gradient; None leaves it unclipped.
        loss_limit: A step with a larger loss is not applied.
        stop_asked: Whether this rank was told to stop, asked between packs.
        micro_batch_tokens: Most tokens in one pass, where more than one sequence can be in it; None
            passes each pack in one piece.

    Raises:
        BadStepError: The loss or the gradient is not finite, or the loss above its limit.
        AbandonedError: A rank was told to stop.
        OutOfMemoryError: A rank had too little memory for a pass.
            Each on every rank, before the update; parameters and moments are as they were.
        LoneOutOfMemoryError: This rank had, and the others cannot be told.
    """
    started_at_seconds = time.perf_counter()
    try:
        own_losses = _backward(
            strategy,
            share,
            compute=compute,
            scaler=scaler,
            step=step,
            seed=seed,
            stop_asked=stop_asked,
            micro_batch_tokens=micro_batch_tokens,
        )
    except (AbandonedError, OutOfMemoryError):
        optimizer.zero_grad(set_to_none=True)
        raise
    num_targets = sum(pack.num_targets + sum(pack.target_counts[1:]) for pack in share.packs)
    sums = strategy.world.sums([*own_losses, num_targets, *strategy.tokens_by_device(share)])
    losses, num_targets = sums[: share.num_packs], round(sums[share.num_packs])
    tokens_by_device = sums[share.num_packs + 1 :]
    loss = sum(losses)
    update: _Update | None = _Update(grad_norm=0.0, is_applied=False)
    if num_targets and loss_limit < loss < math.inf:
        optimizer.zero_grad(set_to_none=True)
        how = f"is a spike: {loss:.4f}, where {loss_limit:.4f} was the limit"
        worst = max(range(len(losses)), key=losses.__getitem__)
        raise BadStepError(step=step, pack=worst, what="loss", how=how, is_spike=True)
    if num_targets:
        update = _update(
            strategy,
            optimizer,
            scaler,
            loss=loss,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
        )
    optimizer.zero_grad(set_to_none=True)
    if update is None:
        bad = next((n for n, one in enumerate(losses) if not math.isfinite(one)), None)
        what = "gradient" if bad is None else "loss"
        how = "is not finite (NaN or infinite)"
        raise BadStepError(step=step, pack=bad, what=what, how=how)
    num_tokens, most = round(sum(tokens_by_device)), max(tokens_by_device)
    return StepReport(
        step=step + 1,
        loss=loss,
        grad_norm=update.grad_norm,
        learning_rate=learning_rate,
        num_targets=num_targets,
        num_tokens=num_tokens,
        idle_share=1.0 - num_tokens / (len(tokens_by_device) * most) if most else 0.0,
        seconds=time.perf_counter() - started_at_seconds,
        is_applied=update.is_applied,
        has_overflowed=bool(num_targets) and not update.is_applied,
    )


def try_step(
    strategy: Strategy, share: StepShare[BatchT], optimizer: AdamW, *, compute: Compute
) -> None:
    """Run a step's packs forward and back as `train_step` does, and update nothing.

    Raises:
        OutOfMemoryError: On every rank: some rank had too little memory.
    """
    try:
        _backward(
            strategy,
            share,
            compute=compute,
            scaler=None,
            step=0,
            seed=0,
            stop_asked=never,
            micro_batch_tokens=None,
        )
    finally:
        optimizer.zero_grad(set_to_none=True)


def _backward(
    strategy: Strategy,
    share: StepShare[BatchT],
    *,
    compute: Compute,
    scaler: torch.amp.GradScaler | None,
    step: int,
    seed: int,
    stop_asked: Callable[[], bool],
    micro_batch_tokens: int | None,
) -> list[float]:
    """Leave the step's gradient in the parameters.

    Returns:
        What each pack of the step adds to its loss; 0 for the packs of other ranks.

    Raises:
        AbandonedError: A rank was told to stop; the gradient is not complete.
        OutOfMemoryError, LoneOutOfMemoryError: Neither is it here.
    """
    world = strategy.world
    by_sum = zip(*(pack.target_counts for pack in share.packs), strict=True)
    counted = world.begin_sums([sum(counts) for counts in by_sum])
    dropout_seed = dropout_seed_of(seed, step=step)
    parts = cut_packs(share.packs, max_tokens=micro_batch_tokens, world=world)
    if sees_whole_step(parts):
        parts = _seen_whole(strategy, parts, compute=compute, dropout_seed=dropout_seed)
    rounds = list(strategy.rounds([part.batch for part in parts]))
    mean_shares: list[Tensor] = []

    def run(some: Sequence[BatchT]) -> None:
        """One pass forward and back."""
        with compute.autocast():
            losses = strategy.losses(some, dropout_seed=dropout_seed)
        of_all = counted.wait()
        found = [
            _share_of_means(loss.nats, part.target_counts, of_all)
            for loss, part in zip(losses, some, strict=True)
        ]
        mean_shares.extend(mean_share.detach() for mean_share in found)
        total = torch.stack(found).sum()
        (total if scaler is None else scaler.scale(total)).backward()  # type: ignore[no-untyped-call]

    for number, some in enumerate(rounds):
        is_last = number == len(rounds) - 1
        with strategy.accumulating(is_last=is_last):
            did_not_fit = _ran_out_of_memory(lambda some=some: run(some), compute)  # type: ignore[misc]
            if did_not_fit and strategy.meets_in_passes and world.size > 1:
                raise LoneOutOfMemoryError(world.rank)
        is_asked, has_failed = world.sums([stop_asked(), did_not_fit])
        if has_failed:
            raise OutOfMemoryError
        if is_asked and not is_last:
            raise AbandonedError
    by_pack = [0.0] * share.num_packs
    for part, value in zip(parts, torch.stack(mean_shares).tolist(), strict=True):
        if part.pack is not None and part.pack < len(share.numbers):  # fillers come last
            by_pack[share.numbers[part.pack]] += value
    return by_pack


def _seen_whole(
    strategy: Strategy, parts: list[Part[BatchT]], *, compute: Compute, dropout_seed: int
) -> list[Part[BatchT]]:
    """The parts with the gradients of their embeddings, which a pass without backward finds.

    Raises:
        OutOfMemoryError, LoneOutOfMemoryError: As `_backward`.
    """
    embeddings: list[Tensor] = []

    def run() -> None:
        embeddings[:] = first_pass(strategy, parts, compute=compute, dropout_seed=dropout_seed)

    did_not_fit = _ran_out_of_memory(run, compute)
    if did_not_fit and strategy.meets_in_passes and strategy.world.size > 1:
        raise LoneOutOfMemoryError(strategy.world.rank)
    if strategy.world.sums([did_not_fit])[0]:
        raise OutOfMemoryError
    return with_gradients(strategy, parts, embeddings, compute=compute)


def _share_of_means(nats: Tensor, counts: Sequence[float], of_all: Sequence[float]) -> Tensor:
    """What a part adds to the loss: each of its sums over the targets that all parts have of it.

    A sum without targets is taken all the same: other ranks wait for its gradient, 0.
    """
    sums = [nats] if nats.ndim == 0 else nats.unbind()
    shares = [
        one / (whole or 1.0) if count else one * 0.0
        for one, count, whole in zip(sums, counts, of_all, strict=True)
    ]
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum()


def _ran_out_of_memory(run: Callable[[], None], compute: Compute) -> bool:
    """Whether a pass did not fit; what it had taken is free again."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return False
    give_back_memory(compute.device)
    return True


def _update(
    strategy: Strategy,
    optimizer: AdamW,
    scaler: torch.amp.GradScaler | None,
    *,
    loss: float,
    learning_rate: float,
    max_grad_norm: float | None,
) -> _Update | None:
    """Clip and update; None if the loss or the gradient is not finite."""
    if scaler is not None:
        scaler.unscale_(optimizer)  # before the norm: clipping scaled gradients clips always
    square = strategy.sum_over_shards(optimizer.squared_grad_norm())
    # In fp32: ranks that add up parts of the float64 sum in another order still clip alike.
    grad_norm = float(torch.tensor(square, dtype=torch.float64).sqrt().float())
    overflowed = (
        scaler is not None
        and scaler.get_scale() > SMALLEST_LOSS_SCALE
        and math.isfinite(loss)
        and not math.isfinite(grad_norm)
    )
    if not overflowed and not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return None
    optimizer.set_learning_rate(learning_rate)
    optimizer.clip_factor = 1.0
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        optimizer.clip_factor = max_grad_norm / (grad_norm + 1e-6)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)  # skips the update where a gradient overflowed
        scaler.update()
    return _Update(grad_norm=grad_norm, is_applied=not overflowed)
