"""One small world and one zygote for all tests of faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_harness.runs import Zygote
from fault_harness.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Data, and a pretraining run that nothing stopped."""
    zygote = Zygote(tmp_path_factory.mktemp("runs"))
    try:
        yield World(tmp_path_factory.mktemp("faults"), zygote)
    finally:
        zygote.close()


@pytest.fixture(scope="session")
def tuned(world: World) -> Path:
    """A fine-tuning run that nothing stopped."""
    world.zygote.run(world.finetune(world.root / "tuned")).must()
    return world.root / "tuned"
