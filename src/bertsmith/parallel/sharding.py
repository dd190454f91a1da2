"""Tensors that FSDP spreads over ranks, and back: an ordinary tensor is its own only part."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor in one piece, on every rank; all ranks have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy values, which every rank has in one piece, into a tensor that may be spread."""
    if isinstance(tensor, DTensor):
        spread = distribute_tensor(
            values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
        tensor.to_local().copy_(spread.to_local())
    else:
        tensor.copy_(values)
