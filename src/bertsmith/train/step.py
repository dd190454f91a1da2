"""One optimizer step, and the only place where a gradient is asked for.

The loss of a step is the mean over all its targets: losses travel as sums, the number of targets is
counted before the first backward, and there is one division. Cutting a step into more packs
therefore changes nothing but rounding (transformers scales such gradients wrongly: issue 47688).
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from bertsmith.batch import LossSum
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
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class LossModel(Protocol[BatchT_contra]):
    """A model that owns its loss."""

    def __call__(self, batch: BatchT_contra, *, dropout_seed: int | None) -> LossSum:
        """Summed loss of a pack."""
        ...


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
    model: LossModel[BatchT],
    packs: Sequence[BatchT],
    optimizer: AdamW,
    *,
    compute: Compute,
    scaler: torch.amp.GradScaler | None,
    step: int,
    seed: int,
    learning_rate: float,
    max_grad_norm: float | None,
) -> StepReport:
    """Run the packs, then update once with the mean over all their targets.

    Args:
        model: Whose parameters the optimizer holds; its gradients are empty before and after.
        packs: Micro-batches of this step.
        optimizer: Updates the parameters.
        compute: Device and format of the forward pass.
        scaler: Scales the loss of an fp16 run; None for the others.
        step: Steps done before, from 0.
        seed: The run's; dropout follows from it, the step and the pack.
        learning_rate: Of this update.
        max_grad_norm: L2 bound on the gradient; None leaves it unclipped.

    Raises:
        NonFiniteLossError: Before the update; parameters and moments are as they were.
    """
    started_at_seconds = time.perf_counter()
    num_targets = sum(pack.num_targets for pack in packs)
    num_tokens = sum(pack.num_tokens for pack in packs)
    losses: dict[int, Tensor] = {}
    for number, pack in enumerate(packs):
        if pack.num_targets == 0:
            continue
        with compute.autocast():
            loss = model(pack.to(compute.device), dropout_seed=dropout_seed_of(seed, step=step))
        mean_share = loss.nats / num_targets
        losses[number] = mean_share.detach()
        if scaler is not None:
            mean_share = scaler.scale(mean_share)
        mean_share.backward()  # type: ignore[no-untyped-call]
    report = _update(
        optimizer,
        scaler,
        list(losses.values()),
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
    )
    if report is None:
        bad = [number for number, loss in losses.items() if not bool(torch.isfinite(loss))]
        optimizer.zero_grad(set_to_none=True)
        what = "loss" if bad else "gradient"
        raise NonFiniteLossError(step=step, pack=bad[0] if bad else None, what=what)
    total_loss, grad_norm, is_applied = report
    optimizer.zero_grad(set_to_none=True)
    return StepReport(
        step=step + 1,
        loss=total_loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_targets=num_targets,
        num_tokens=num_tokens,
        seconds=time.perf_counter() - started_at_seconds,
        is_applied=is_applied,
    )


def _update(
    optimizer: AdamW,
    scaler: torch.amp.GradScaler | None,
    losses: list[Tensor],
    *,
    learning_rate: float,
    max_grad_norm: float | None,
) -> tuple[float, float, bool] | None:
    """Clip and update; (loss, gradient norm, whether applied), or None if not finite."""
    if not losses:
        return 0.0, 0.0, False
    if scaler is not None:
        scaler.unscale_(optimizer)  # before the norm: clipping scaled gradients clips always
    loss, grad_norm = float(torch.stack(losses).double().sum()), float(optimizer.grad_norm())
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
    return loss, grad_norm, not overflowed
