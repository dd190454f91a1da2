"""Low-rank adapters (Hu et al. 2021, LoRA): B A x, scaled, added to a frozen product W x.

Shape legend: T packed tokens (or those of them that are wanted), I width going in, O width coming
out, R rank, of several adapters side by side the sum of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.dropout import apply_dropout, dropout_at


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlace:
    """Where in a training step a product's rows are, which is what dropout depends on."""

    dropout_seed: int | None
    """Of the pass; None for inference."""

    first_row: int
    """Number in its step of the pass's first token."""

    rows_M: Tensor | None = None
    """Tokens of the pass that the rows are, int64; None: all."""


class Adapter(nn.Module):
    """One addition to one product.

    `up` starts at zero, so that a new adapter changes nothing; `down` gets its start from
    `lora.attach`.
    """

    def __init__(
        self,
        *,
        width_in: int,
        width_out: int,
        rank: int,
        scale: float,
        drop_prob: float,
        dropout_site: int,
    ) -> None:
        """Allocate.

        Args:
            width_in: I of the product.
            width_out: O of the product.
            rank: R.
            scale: What B A x is multiplied with, alpha / rank.
            drop_prob: Of an element of x.
            dropout_site: Number of this dropout within the model.
        """
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width_in))
        self.up = nn.Parameter(torch.zeros(width_out, rank))
        self.scale, self.drop_prob, self.dropout_site = scale, drop_prob, dropout_site

    @torch.no_grad()
    def weight_OI(self) -> Tensor:
        """What the adapter adds to the product's weight."""
        return self.scale * (self.up @ self.down)


def add_low_rank(
    made_TO: Tensor, values_TI: Tensor, adapters: Sequence[tuple[int, Adapter]], place: PassPlace
) -> Tensor:
    """A product with what its adapters add, written over it.

    Adapters of one product share their two small products, so that the large tensor is gone
    through once. Without dropout nothing is kept but the values, once for all of them, and T x R.

    Args:
        made_TO: W x + b, fresh from its product, which needs no copy of it.
        values_TI: x.
        adapters: Each with the column of `made_TO` where its output begins, ascending; all have
            one scale.
        place: Of the rows.
    """
    if not adapters:
        return made_TO
    if any(adapter.drop_prob for _, adapter in adapters) and place.dropout_seed is not None:
        lows = [F.linear(_dropped(values_TI, one, place), one.down) for _, one in adapters]
        low_TR = torch.cat(lows, 1)
    else:
        low_TR = F.linear(values_TI, torch.cat([one.down for _, one in adapters]))
    up_RO = _side_by_side(adapters, made_TO.shape[1])
    # In place, which autocast leaves alone: the types have to agree by themselves.
    return made_TO.addmm_(low_TR, up_RO.to(made_TO.dtype), alpha=adapters[0][1].scale)


def _side_by_side(adapters: Sequence[tuple[int, Adapter]], width: int) -> Tensor:
    """Every B, turned, at its columns, and zeros beside it; shape (R, O)."""
    rows = [F.pad(one.up.T, (first, width - first - one.up.shape[0])) for first, one in adapters]
    return torch.cat(rows)


def _dropped(values_TI: Tensor, adapter: Adapter, place: PassPlace) -> Tensor:
    drop = dropout_at(
        drop_prob=adapter.drop_prob,
        seed=place.dropout_seed,
        site=adapter.dropout_site,
        first_row=place.first_row,
    )
    return apply_dropout(values_TI, drop, place.rows_M)
