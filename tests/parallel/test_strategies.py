"""What a strategy counts."""

import torch
from torch import nn

from bertsmith.batch import MaskedBatch, StepShare, pack
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World


def test_tokens_of_a_filler_are_not_counted() -> None:
    """Else a budget in tokens would end sooner on more ranks."""
    none = torch.zeros(0, dtype=torch.int64)
    packs = [
        MaskedBatch(inputs=pack([torch.arange(n)]), positions_M=none, targets_M=none)
        for n in (7, 2)
    ]
    share = StepShare(packs=packs, numbers=[0], num_packs=3)
    assert Strategy(nn.Linear(1, 1), World()).tokens_by_device(share) == [7]
