"""One optimizer step, and the only place where a gradient is asked for.

The loss of a step is the mean over all its targets: losses travel as sums, the number of targets is
counted over all ranks before the first backward, and there is one division. Cutting a step into
more packs, or sharing it out over ranks, therefore changes nothing but rounding (transformers
scales such gradients wrongly: issue 47688).
"""

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from bertsmith.batch import StepShare
from bertsmith.parallel.strategies import Strategy
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute

SMALLEST_LOSS_SCALE = 2.0**-10
"""An fp16 gradient that overflows even at this scale is not finite for other reasons."""


class Batch(Protocol):
    """A pack with something to predict."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        ...

    @property
    def num_targets(self) -> int:
        """Terms of the loss."""
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
    """Nats a target, over the whole step; 0 if it had no target."""

    grad_norm: float
    """L2 norm of the gradient before clipping."""

    learning_rate: float
    num_targets: int
    num_tokens: int
    """Real tokens."""

    idle_share: float
    """Work that ranks with fewer tokens had to wait for: 1 - mean / most tokens of a rank."""

    seconds: float
    """From asking for the step's packs to the end of the update."""

    is_applied: bool
    """False when there was nothing to learn, or fp16 overflowed and the step was skipped."""


class NonFiniteLossError(Exception):
    """The loss or the gradient is NaN or infinite; the weights have not been touched."""

    def __init__(self, *, step: int, pack: int | None, what: str) -> None:
        """Remember where.

        Args:
            step: The step, counted from 0.
            pack: Its pack with a loss that is not finite; None if only the gradient is.
            what: "loss" or "gradient".
        """
        super().__init__(f"{what} of step {step + 1} is not finite")
        self.step, self.pack, self.what = step, pack, what


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

    Raises:
        NonFiniteLossError: On every rank, before the update; parameters and moments are as they
            were.
    """
    started_at_seconds = time.perf_counter()
    own_losses = _backward(strategy, share, compute=compute, scaler=scaler, step=step, seed=seed)
    num_targets = sum(pack.num_targets for pack in share.packs)
    sums = strategy.world.sums([*own_losses, num_targets, *strategy.tokens_by_device(share)])
    losses, num_targets = sums[: share.num_packs], round(sums[share.num_packs])
    tokens_by_device = sums[share.num_packs + 1 :]
    report = _update(
        strategy,
        optimizer,
        scaler,
        loss=sum(losses) if num_targets else None,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
    )
    optimizer.zero_grad(set_to_none=True)
    if report is None:
        bad = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
        what = "gradient" if bad is None else "loss"
        raise NonFiniteLossError(step=step, pack=bad, what=what)
    grad_norm, is_applied = report
    num_tokens, most = round(sum(tokens_by_device)), max(tokens_by_device)
    return StepReport(
        step=step + 1,
        loss=sum(losses),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_targets=num_targets,
        num_tokens=num_tokens,
        idle_share=1.0 - num_tokens / (len(tokens_by_device) * most) if most else 0.0,
        seconds=time.perf_counter() - started_at_seconds,
        is_applied=is_applied,
    )


def _backward(
    strategy: Strategy,
    share: StepShare[BatchT],
    *,
    compute: Compute,
    scaler: torch.amp.GradScaler | None,
    step: int,
    seed: int,
) -> list[float]:
    """Leave the step's gradient in the parameters.

    Returns:
        What each pack of the step adds to its loss; 0 for the packs of other ranks.
    """
    packs = list(share.packs)
    counted = strategy.world.begin_sums([sum(pack.num_targets for pack in packs)])
    dropout_seed = dropout_seed_of(seed, step=step)
    mean_shares: list[Tensor] = []
    rounds = list(strategy.rounds(packs))
    for number, some in enumerate(rounds):
        with strategy.accumulating(is_last=number == len(rounds) - 1):
            with compute.autocast():
                losses = strategy.losses(some, dropout_seed=dropout_seed)
            num_targets = max(counted.wait()[0], 1.0)
            # A pack without targets is run all the same: other ranks wait for its gradient, 0.
            found = [
                loss.nats / num_targets if pack.num_targets else loss.nats * 0.0
                for loss, pack in zip(losses, some, strict=True)
            ]
            mean_shares += [mean_share.detach() for mean_share in found]
            total = torch.stack(found).sum()
            (total if scaler is None else scaler.scale(total)).backward()  # type: ignore[no-untyped-call]
    by_pack = [0.0] * share.num_packs
    values = torch.stack(mean_shares).tolist()
    for number, value in zip(share.numbers, values, strict=False):  # fillers come last
        by_pack[number] = value
    return by_pack


def _update(
    strategy: Strategy,
    optimizer: AdamW,
    scaler: torch.amp.GradScaler | None,
    *,
    loss: float | None,
    learning_rate: float,
    max_grad_norm: float | None,
) -> tuple[float, bool] | None:
    """Clip and update; (gradient norm, whether applied), or None if not finite.

    `loss` is None where the step had no target.
    """
    if loss is None:
        return 0.0, False
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
    return grad_norm, not overflowed
