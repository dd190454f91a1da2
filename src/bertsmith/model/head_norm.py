"""Normalisation in a task head: between the pooled vector and the classifier.

Batch norm is Ioffe and Szegedy's (2015), with the synchronised statistics that PyTorch calls
SyncBatchNorm. It differs from `torch.nn.BatchNorm1d` in what a run on ranks needs: whether a pass
is training is an argument, a rank may have no row at all, and one row alone is no error.

Statistics are those of one pack, joined over ranks where the norm is synchronised; never those of
a whole step of several packs.

Shape legend: N sequences of this rank's pack, D width, C classes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from bertsmith.model.config import HeadNorm

MOMENTUM = 0.1
"""How far a pack moves the running statistics, as in torch."""

EPS = 1e-5
"""Added to a variance, as in torch."""


class BatchNorm(nn.Module):
    """Each feature, over the sequences of a pack, brought to a mean and spread that are learned.

    Arithmetic is in float64: it is little, and so one process and many ranks agree to the rounding
    of the result. Variances of a batch are biased, those that run are not, as in torch.

    One sequence alone, on all ranks together, has no variance to be measured by: its own statistics
    would turn it into the bias, whatever it says. It is normalised with the running statistics, and
    leaves them as they are. So is a pack without a sequence.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        """A scale of one, a shift of zero; the running mean is 0 and the running variance 1.

        Args:
            width: Features, D.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self._group: dist.ProcessGroup | None = None

    def reset(self) -> None:
        """Go back to the start, statistics included."""
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.bias.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)

    def synchronize(self, group: dist.ProcessGroup | None) -> None:
        """From now on take the statistics of the rows of all ranks together; None: of this one's.

        Every rank of the group must then run forward and backward equally often, with no row if it
        has none. The gradient of a row is that of the sum of all ranks' losses; gradients of
        weight and bias are this rank's part, to be summed over ranks like any other parameter's.

        Args:
            group: Best one of its own, so that no other message of the backward pass can come
                between. gloo for rows on a CPU; on a GPU `torch.nn.SyncBatchNorm` computes.
        """
        self._group = None if group is None or group.size() == 1 else group

    def affine(self) -> tuple[Tensor, Tensor]:
        """What inference does: scale and shift of each feature, float64."""
        scale_D = self.weight.double() * (self.running_var.double() + EPS).rsqrt()
        mean_D = self.running_mean.to(torch.float64, copy=True)  # the buffer may move on
        return scale_D, self.bias.double() - mean_D * scale_D

    def forward(self, hidden_ND: Tensor, *, is_training: bool) -> Tensor:
        """Normalised rows, in the type of `hidden_ND`.

        Args:
            hidden_ND: One row a sequence; none is fine.
            is_training: Whether to use, and learn, the statistics of these rows. In inference the
                running ones are used, and no rank waits for another.
        """
        if not is_training:
            return self._by_running(hidden_ND)
        if self._group is not None and hidden_ND.device.type == "cuda":
            return self._by_sync_batch_norm(hidden_ND)
        count, mean_D, variance_D = _moments(hidden_ND.detach().double(), self._group)
        is_enough = count >= 2
        used_mean_D = torch.where(is_enough, mean_D, self.running_mean.double())
        used_variance_D = torch.where(is_enough, variance_D, self.running_var.double())
        self._learn(is_enough, mean_D, variance_D * count / (count - 1).clamp(min=1))
        normed_ND: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            hidden_ND,
            self.weight,
            self.bias,
            used_mean_D,
            (used_variance_D + EPS).rsqrt(),
            torch.where(is_enough, 1.0 / count, 0.0),
            self._group,
        )
        return normed_ND

    def _by_running(self, hidden_ND: Tensor) -> Tensor:
        scale_D, shift_D = self.affine()
        return (hidden_ND.double() * scale_D + shift_D).to(hidden_ND.dtype)

    def _by_sync_batch_norm(self, hidden_ND: Tensor) -> Tensor:
        """A training pass by `torch.nn.SyncBatchNorm`, which is made for GPUs.

        Around it stands what it lacks: it would write NaN into the running variance where all ranks
        together have one row. Rows go in as fp32, the type that a rank without any would miss.
        """
        count = torch.tensor(float(len(hidden_ND)), device=hidden_ND.device)
        _sum_over_ranks(count, self._group)
        # Also gives ranks without a row gradients of zero, where SyncBatchNorm gives them none.
        by_running_ND = self._by_running(hidden_ND.float())
        learned = {name: running_D.clone() for name, running_D in self.named_buffers()}
        with torch.device("meta"):
            torch_norm = nn.SyncBatchNorm(
                len(self.weight), eps=EPS, momentum=MOMENTUM, process_group=self._group
            )
        num_batches = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        by_batch_ND = functional_call(
            torch_norm,
            {
                "weight": self.weight.float(),
                "bias": self.bias.float(),
                "num_batches_tracked": num_batches,
                **learned,
            },
            (hidden_ND.float(),),
        )
        for name, running_D in self.named_buffers():
            running_D.copy_(torch.where(count >= 2, learned[name], running_D))
        return torch.where(count >= 2, by_batch_ND, by_running_ND).to(hidden_ND.dtype)

    @torch.no_grad()
    def _learn(self, is_enough: Tensor, mean_D: Tensor, unbiased_variance_D: Tensor) -> None:
        """Move the running statistics towards a batch's, in place; no value is waited for."""
        share = is_enough.double() * MOMENTUM
        for running_D, batch_D in (
            (self.running_mean, mean_D),
            (self.running_var, unbiased_variance_D),
        ):
            running_D.copy_(running_D.double().lerp(batch_D, share))


class _Normalize(torch.autograd.Function):
    """Rows by given statistics, with the gradient that also goes through these statistics.

    The statistics are those of all ranks' rows, so the two sums of the backward pass are too. A
    share of 0 says that the statistics do not come from the rows, and are constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        mean_D: Tensor,
        inv_std_D: Tensor,
        share: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """Weight times the standardised row, plus bias. `share`: of one row in the mean, 1/N."""
        standard_ND = (hidden_ND.double() - mean_D) * inv_std_D
        ctx.save_for_backward(standard_ND, weight_D, inv_std_D, share)
        ctx.group, ctx.bias_dtype = group, bias_D.dtype
        return (standard_ND * weight_D.double() + bias_D.double()).to(hidden_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        """For a row: its own gradient, less what a moving mean and variance take from it.

        With g the gradient of a standardised row z: (g - mean(g) - z mean(g z)) / std.
        """
        standard_ND, weight_D, inv_std_D, share = ctx.saved_tensors
        grad64_ND = grad_ND.double()
        grad_bias_D, grad_weight_D = grad64_ND.sum(0), (grad64_ND * standard_ND).sum(0)
        sums_2D = torch.stack([grad_bias_D, grad_weight_D])
        _sum_over_ranks(sums_2D, ctx.group)
        mean_D, mean_with_z_D = sums_2D * share
        grad_hidden_ND = grad64_ND - mean_D - standard_ND * mean_with_z_D
        return (
            (grad_hidden_ND * (weight_D.double() * inv_std_D)).to(grad_ND.dtype),
            grad_weight_D.to(weight_D.dtype),
            grad_bias_D.to(ctx.bias_dtype),
            *(None,) * 4,
        )


def _moments(rows_ND: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and biased variance of the rows of all ranks, float64; 0 where there are none.

    In two passes, so that a mean that is large beside the spread costs no digits.
    """
    count_and_sum = torch.cat([rows_ND.new_tensor([len(rows_ND)]), rows_ND.sum(0)])
    _sum_over_ranks(count_and_sum, group)
    count = count_and_sum[0]
    mean_D = count_and_sum[1:] / count.clamp(min=1)
    squares_D = (rows_ND - mean_D).square().sum(0)
    _sum_over_ranks(squares_D, group)
    return count, mean_D, squares_D / count.clamp(min=1)


def _sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up in place; every rank gets the same bits."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)


def make_head_norm(kind: HeadNorm, width: int, *, layer_norm_eps: float) -> nn.Module | None:
    """The norm of a head, with its start values.

    Args:
        kind: Which; None comes back for "none".
        width: Features.
        layer_norm_eps: The encoder's, for a layer norm.
    """
    if kind == "none":
        return None
    return BatchNorm(width) if kind == "batch" else nn.LayerNorm(width, eps=layer_norm_eps)


def normalized(norm: nn.Module | None, hidden_ND: Tensor, *, is_training: bool) -> Tensor:
    """What a head's norm makes of its rows; the rows themselves where there is none."""
    if norm is None:
        return hidden_ND
    normed_ND: Tensor
    if isinstance(norm, BatchNorm):
        normed_ND = norm(hidden_ND, is_training=is_training)
    else:
        normed_ND = norm(hidden_ND)
    return normed_ND


def synchronized(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """The same module, each `BatchNorm` in it taking the statistics of all ranks of `group`.

    Rows on a GPU are then normalised by `torch.nn.SyncBatchNorm`, rows on a CPU by the code here.
    Parameters stay the same objects; a module without a batch norm stays as it is.
    """
    for part in module.modules():
        if isinstance(part, BatchNorm):
            part.synchronize(group)
    return module


def fold(norm: BatchNorm, classifier: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C) of the one linear layer that equals norm, then classifier.

    In inference only, where batch norm is affine. float64; the caller rounds once.
    """
    with torch.no_grad():
        scale_D, shift_D = norm.affine()
        weight_CD = classifier.weight.double()
        return weight_CD * scale_D, classifier.bias.double() + weight_CD @ shift_D
