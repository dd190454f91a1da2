"""What each device carried."""

import threading

import pytest
import torch

from bertsmith.parallel.world import World
from bertsmith.report import devices
from bertsmith.report.devices import BusySampler, DeviceUse, devices_of, uses_of


def test_a_cpu_has_its_memory_and_no_busy_share() -> None:
    with BusySampler([]) as sampler:
        (use,) = uses_of(sampler, torch.device("cpu"), World())
    assert use.peak_memory_bytes > 1 << 20
    assert use.busy_share is None


def test_busy_shares_are_means_of_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 is busy in all samples, GPU 1 in every other one."""
    monkeypatch.setattr(devices, "SAMPLE_SECONDS", 0.001)
    asked, enough = [0, 0], threading.Event()

    def ask(device: int) -> int:
        asked[device] += 1
        if asked[1] == 6:
            enough.set()
        if asked[device] > 6:
            raise RuntimeError("no more")
        return 100 if device == 0 or asked[1] % 2 else 0

    with BusySampler([0, 1], ask=ask) as sampler:
        assert enough.wait(10.0)
    assert sampler.busy_shares == [1.0, 0.5]


def test_dp_uses_the_first_gpus_and_a_rank_its_own() -> None:
    assert devices_of(torch.device("cuda", 0), 3, World()) == [0, 1, 2]
    assert devices_of(torch.device("cpu"), 2, World()) == []
    text = str(DeviceUse(peak_memory_bytes=3 << 29, busy_share=0.25))
    assert text == "1.50 GiB at most, busy 25% of the time"
