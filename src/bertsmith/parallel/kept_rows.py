"""Under fsdp the token table stays whole; rows that the data never reaches still stay as they are.

Without this, weight decay would shrink them, and a model fine-tuned under fsdp would differ from
one fine-tuned under ddp, where such rows are set aside (`model.compact`). Checkpoints hold the
table's moments whole under each, so that a run moves between them.

Shape legend: V vocabulary, R rows in use, D width.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bertsmith.parallel.sharding import own_part


def keep_unused_rows(table_VD: Tensor, used_ids: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Put rows whose ids do not occur back after every update.

    Args:
        table_VD: A parameter of the optimizer, in shards of rows.
        used_ids: Every token id that training will ask for, in any order.
        optimizer: Updates the table.
    """
    mine_RD = own_part(table_VD.detach())
    first = _first_row(table_VD, len(mine_RD))
    used_V = torch.zeros(len(table_VD), dtype=torch.bool)
    used_V[used_ids.long()] = True
    unused = torch.nonzero(~used_V[first : first + len(mine_RD)]).flatten().to(mine_RD.device)
    as_it_was = mine_RD[unused].clone()

    def put_back(*_: Any) -> None:
        mine_RD.index_copy_(0, unused, as_it_was)

    optimizer.register_step_post_hook(put_back)


class TrainedRows:
    """Moments of a token table of which only some rows are trained; checkpoints hold them whole.

    A row without a gradient has moments of zero, so the whole ones are those of a run that trains
    the whole table, to the bit.
    """

    def __init__(self, parameter: str, used_ids: Tensor, *, num_rows: int) -> None:
        """Nothing is copied yet.

        Args:
            parameter: The table's name in the optimizer.
            used_ids: Every token id that training will ask for, in any order.
            num_rows: V, of the whole table.
        """
        self._parameter, self._num_rows = parameter, num_rows
        self._rows_R = torch.unique(used_ids).to(torch.int64)

    def whole(self, moments: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """An optimizer's moments by name, the table's widened to V x D on the CPU."""
        for name, moment in moments:
            if self._is_narrow(name, moment):
                whole_VD = torch.zeros(self._num_rows, moment.shape[1], dtype=moment.dtype)
                whole_VD[self._rows_R] = moment.cpu()
                yield name, whole_VD
            else:
                yield name, moment

    def fitted(self, name: str, stored: Tensor, moment: Tensor) -> Tensor:
        """A stored moment as an optimizer's is: narrow where that is narrow, whole where whole.

        Args:
            name: The moment's.
            stored: R x D of checkpoints made before they held it whole.
            moment: What it is for.
        """
        if self._is_narrow(name, moment) and len(stored) == self._num_rows:
            return stored[self._rows_R]
        if self._is_narrow(name, stored) and len(moment) == self._num_rows:
            return next(self.whole([(name, stored)]))[1]
        return stored

    def _is_narrow(self, name: str, moment: Tensor) -> bool:
        is_table = name.endswith(f"/{self._parameter}")
        return is_table and len(moment) == len(self._rows_R) < self._num_rows


def _first_row(table_VD: Tensor, num_mine: int) -> int:
    """Shards are cut as torch.chunk cuts: all of one size, the last ones smaller or empty."""
    if not isinstance(table_VD, DTensor):
        return 0
    mesh = table_VD.device_mesh
    each = -(-len(table_VD) // mesh.size())
    first = min(mesh.get_local_rank() * each, len(table_VD))
    assert num_mine == min(each, len(table_VD) - first), "a shard of rows as FSDP2 cuts it"
    return first
