"""Under fsdp the token table stays whole; rows that the data never reaches still stay as they are.

Without this, weight decay would shrink them, and a model fine-tuned under fsdp would differ from
one fine-tuned under ddp, where such rows are set aside (`model.compact`).
"""

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


def _first_row(table_VD: Tensor, num_mine: int) -> int:
    """Shards are cut as torch.chunk cuts: all of one size, the last ones smaller or empty."""
    if not isinstance(table_VD, DTensor):
        return 0
    mesh = table_VD.device_mesh
    each = -(-len(table_VD) // mesh.size())
    first = min(mesh.get_local_rank() * each, len(table_VD))
    assert num_mine == min(each, len(table_VD) - first), "a shard of rows as FSDP2 cuts it"
    return first
