"""A tiny masked-language model and packs to train it on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bertsmith.batch import MaskedBatch, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters

TINY = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
)


def make_pack(seed: int, lengths: list[int], num_targets: int) -> MaskedBatch:
    """A pack of random ids with so many targets."""
    rng = np.random.default_rng(seed)
    sequences = [torch.from_numpy(rng.integers(5, 50, n)) for n in lengths]
    positions = np.sort(rng.choice(sum(lengths), num_targets, replace=False))
    return MaskedBatch(
        inputs=pack(sequences),
        positions_M=torch.from_numpy(positions),
        targets_M=torch.from_numpy(rng.integers(5, 50, num_targets)),
    )


@pytest.fixture
def new_run() -> Callable[[OptimConfig], tuple[MaskedLM, AdamW]]:
    """Makes a model and its optimizer, the same ones each time."""

    def make(config: OptimConfig) -> tuple[MaskedLM, AdamW]:
        model = MaskedLM(TINY)
        initialize(model, config=TINY, seed=1)
        return model, AdamW(group_parameters(model, config), config)

    return make


@pytest.fixture
def make_masked_pack() -> Callable[[int, list[int], int], MaskedBatch]:
    """Makes packs."""
    return make_pack
