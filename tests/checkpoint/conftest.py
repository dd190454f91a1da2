"""A tiny optimizer with moments of its own, and how to save it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith.checkpoint.folder import Identity, write_checkpoint
from bertsmith.checkpoint.state import RunState
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters

IDENTITY = Identity(
    verb="pretrain",
    config={"seed": 0, "optim.learning_rate": 0.1},
    data={"data": "d", "tokenizer": "t"},
    versions={"bertsmith": "0"},
)

Save = Callable[..., Path]


def write_model(folder: Path) -> None:
    """Stands for the Hugging Face files."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4)


@pytest.fixture
def optimizer() -> AdamW:
    """Over two parameters, each moment with numbers of its own."""
    model = nn.Linear(7, 3)
    made = AdamW(group_parameters(model, OptimConfig()), OptimConfig())
    for number, (_, moment) in enumerate(made.named_moments()):
        moment.normal_(generator=torch.Generator().manual_seed(number))
    return made


@pytest.fixture
def save(optimizer: AdamW) -> Save:
    """Writes `folder/step-N`."""

    def write(folder: Path, step: int, *, value: float | None = None) -> Path:
        return write_checkpoint(
            folder,
            state=RunState(step=step, updates=step, tokens=step * 10, value=value),
            identity=IDENTITY,
            moments=list(optimizer.named_moments()),
            write_model=write_model,
            model_bytes=1024,
        )

    return write
