"""What each device of a run carried: memory, and how busy it was.

Under dp the first GPU holds the optimizer and everybody's gradients; these figures show it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from bertsmith.parallel.world import World
from bertsmith.report.run_folder import peak_memory_bytes

SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """One device's part in a run."""

    peak_memory_bytes: int
    busy_share: float | None
    """Share of the time in which it computed; None where nothing tells (a CPU, no pynvml)."""

    def __str__(self) -> str:
        """For a line of the log."""
        busy = "" if self.busy_share is None else f", busy {self.busy_share:.0%} of the time"
        return f"{self.peak_memory_bytes / 2**30:.2f} GiB at most{busy}"


class BusySampler:
    """Asks the driver once a second how busy GPUs are, while a `with` block lasts."""

    def __init__(
        self, devices: Sequence[int], *, ask: Callable[[int], int] = torch.cuda.utilization
    ) -> None:
        """Nothing is asked yet.

        Args:
            devices: Numbers of the GPUs; none for a CPU.
            ask: Gives the per cent of the last moment in which a GPU was busy.
        """
        self._devices, self._ask = devices, ask
        self._sums, self._num_samples = [0.0] * len(devices), 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="busy", daemon=True)

    def __enter__(self) -> Self:
        if self._devices:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def busy_shares(self) -> list[float | None]:
        """Of each device so far."""
        if self._num_samples == 0:
            return [None] * max(len(self._devices), 1)
        return [total / self._num_samples / 100.0 for total in self._sums]

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            try:
                shares = [self._ask(device) for device in self._devices]
            except Exception:  # no pynvml, or whatever the driver raises: a figure less, no more
                return
            self._sums = [a + b for a, b in zip(self._sums, shares, strict=True)]
            self._num_samples += 1


def devices_of(device: torch.device, at_once: int, world: World) -> list[int]:
    """Numbers of the GPUs that this process uses."""
    if device.type != "cuda":
        return []
    return list(range(at_once)) if world.size == 1 else [device.index]


def uses_of(sampler: BusySampler, device: torch.device, world: World) -> list[DeviceUse]:
    """Every device's use, in the order of ranks, or of the GPUs of dp; all ranks have to ask."""
    shares = sampler.busy_shares
    peaks = [peak_memory_bytes(device)]
    if device.type == "cuda" and len(shares) > 1:
        peaks = [torch.cuda.max_memory_allocated(number) for number in range(len(shares))]
    if world.size > 1:
        mine = [0.0] * (2 * world.size)
        mine[world.rank] = float(peaks[0])
        mine[world.size + world.rank] = -1.0 if shares[0] is None else shares[0]
        sums = world.sums(mine)
        peaks = [round(peak) for peak in sums[: world.size]]
        shares = [None if share < 0.0 else share for share in sums[world.size :]]
    return [
        DeviceUse(peak_memory_bytes=peak, busy_share=share)
        for peak, share in zip(peaks, shares, strict=True)
    ]
