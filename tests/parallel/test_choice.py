"""Which strategy, and whether processes have to be started: said before anything is spent."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bertsmith.errors import UserError
from bertsmith.parallel import choice
from bertsmith.parallel.choice import (
    Devices,
    choose_strategy,
    devices_at_once,
    devices_here,
    num_devices,
    processes_to_start,
)
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.world import World
from ranks import place_of

FOUR_GPUS, ONE_GPU = Devices(kind="cuda", count=4), Devices(kind="cuda", count=1)
EIGHT_CORES = Devices(kind="cpu", count=8)
UNDER_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("config", "devices", "started"),
    [
        (ParallelConfig(), FOUR_GPUS, None),  # several GPUs are never taken unasked
        (ParallelConfig(devices="auto"), FOUR_GPUS, 4),
        (ParallelConfig(devices="auto"), ONE_GPU, None),
        (ParallelConfig(devices="auto"), EIGHT_CORES, None),
        (ParallelConfig(devices=3), EIGHT_CORES, 3),
        (ParallelConfig(devices=2, strategy="fsdp"), FOUR_GPUS, 2),
        (ParallelConfig(devices=2, strategy="dp"), FOUR_GPUS, None),
        (ParallelConfig(strategy="none"), FOUR_GPUS, None),
    ],
)
def test_processes_are_started_for_each_device_unless_one_does(
    config: ParallelConfig, devices: Devices, started: int | None
) -> None:
    assert processes_to_start(config, devices, {}) == started
    assert processes_to_start(ParallelConfig(strategy="ddp"), FOUR_GPUS, UNDER_TORCHRUN) is None


def test_the_last_rank_of_a_shrunk_job_trains_alone_whatever_the_others_were() -> None:
    alone = UNDER_TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for strategy, devices in (("ddp", 1), ("fsdp", 1), ("ddp", 2)):
        config = ParallelConfig(strategy=strategy, devices=devices)  # type: ignore[arg-type]
        assert processes_to_start(config, ONE_GPU, alone) is None


@pytest.mark.parametrize(
    ("config", "devices", "environ", "line"),
    [
        (ParallelConfig(devices=5), FOUR_GPUS, {}, "devices 5: this machine has 4 GPUs"),
        (ParallelConfig(devices=9), EIGHT_CORES, {}, "this machine has 8 CPU cores"),
        (ParallelConfig(strategy="dp"), ONE_GPU, {}, "with one GPU there is nothing to share"),
        (ParallelConfig(strategy="dp", devices=2), EIGHT_CORES, {}, "on the CPU it would do"),
        (ParallelConfig(strategy="none", devices=2), FOUR_GPUS, {}, "uses one device, not 2"),
        (ParallelConfig(strategy="ddp"), FOUR_GPUS, {}, "with one device has nothing to share"),
        (ParallelConfig(strategy="dp"), FOUR_GPUS, UNDER_TORCHRUN, "dp is one process, and torch"),
        (ParallelConfig(strategy="none"), FOUR_GPUS, UNDER_TORCHRUN, "none is one process"),
        (ParallelConfig(devices=3), FOUR_GPUS, UNDER_TORCHRUN, "has started 2 processes on this"),
        (ParallelConfig(), ONE_GPU, UNDER_TORCHRUN, "2 processes on a machine with 1 GPUs"),
        (
            ParallelConfig(),
            FOUR_GPUS,
            UNDER_TORCHRUN | {"MASTER_PORT": "x"},
            "MASTER_PORT is 'x'; it must be a whole number",
        ),
        (
            ParallelConfig(),
            FOUR_GPUS,
            {k: v for k, v in UNDER_TORCHRUN.items() if k != "MASTER_ADDR"},
            "MASTER_ADDR is not set",
        ),
    ],
)
def test_what_cannot_be_done_here_is_one_line(
    config: ParallelConfig, devices: Devices, environ: dict[str, str], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        processes_to_start(config, devices, environ)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="devices is 0"):
        ParallelConfig(devices=0)
    with pytest.raises(ValueError, match="timeout_seconds is"):
        ParallelConfig(timeout_seconds=0.5)


def test_a_cpu_has_as_many_devices_as_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    assert devices_here("cpu") == Devices(kind="cpu", count=3)
    assert num_devices(ParallelConfig(devices="auto"), devices_here("cpu")) == 1


def world_of(size: int) -> World:
    """A world of so many ranks that nobody has joined."""
    return World(place_of(0, size))


@pytest.mark.parametrize(
    ("strategy", "size", "chosen"),
    [("auto", 1, "none"), ("auto", 2, "ddp"), ("ddp", 2, "ddp"), ("fsdp", 4, "fsdp")],
)
def test_the_choice_is_said_with_its_reason(strategy: str, size: int, chosen: str) -> None:
    lines: list[str] = []
    config = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
    assert choose_strategy(config, nn.Linear(2, 2), world_of(size), say=lines.append) == chosen
    assert lines[0].startswith(f"parallel: {chosen}")
    assert devices_at_once(config, world_of(size), device="cpu") == size


def test_auto_shards_what_would_fill_half_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 parameters at 16 bytes are 16,000: under half of 40,000 bytes, over half of 30,000."""
    model = nn.Linear(1000, 1, bias=False)
    for total, name in ((40_000, "ddp"), (30_000, "fsdp")):
        found = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, has=found: has)
        assert choice._fits(model, torch.device("cuda", 0))[0] == name
