"""Which strategy, on how many devices, and why: decided from the options and the machine, aloud."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from bertsmith.errors import UserError
from bertsmith.model.head_norm import BatchNorm, synchronized
from bertsmith.parallel.config import (
    BYTES_A_PARAMETER,
    ParallelConfig,
    StrategyName,
    is_worth_sharding,
)
from bertsmith.parallel.place import place_from
from bertsmith.parallel.strategies import Distributed, FullySharded, Replicas, Strategy
from bertsmith.parallel.world import World
from bertsmith.say import Say


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What this machine offers a run."""

    kind: str
    """cuda or cpu."""

    count: int
    """GPUs; for the CPU its cores, each of which may run a process."""

    @property
    def noun(self) -> str:
        """What one is called."""
        return "GPU" if self.kind == "cuda" else "CPU core"


def devices_here(device: str) -> Devices:
    """This machine's devices of the kind that `--device` names."""
    if device != "cpu" and torch.cuda.is_available():
        return Devices(kind="cuda", count=torch.cuda.device_count())
    return Devices(kind="cpu", count=len(os.sched_getaffinity(0)))


def processes_to_start(
    config: ParallelConfig, devices: Devices, environ: Mapping[str, str]
) -> int | None:
    """How many processes this one has to start in its stead; None if it trains itself.

    Raises:
        UserError: The options cannot be followed here.
    """
    try:
        place = place_from(environ)
    except ValueError as error:
        raise UserError(f"cannot join the other ranks: {error}") from error
    if place is not None and place.size > 1:
        if config.devices not in (1, "auto", place.local_size):
            raise UserError(
                f"--parallel.devices {config.devices}: torchrun or srun has started "
                f"{place.local_size} processes on this machine; leave the option out"
            )
        if config.strategy in ("none", "dp"):
            raise UserError(
                f"--parallel.strategy {config.strategy} is one process, and torchrun or srun has "
                f"started {place.size}; use ddp or fsdp"
            )
        if devices.kind == "cuda" and place.local_size > devices.count and not place.has_own_gpus:
            raise UserError(
                f"{place.local_size} processes on a machine with {devices.count} GPUs; start one "
                "for each"
            )
        return None
    if place is not None:  # the one process that is left of several
        return None
    count = num_devices(config, devices)
    _check(config, devices, count)
    if count == 1 or config.strategy == "dp":
        return None
    return count


def num_devices(config: ParallelConfig, devices: Devices) -> int:
    """Devices of this machine that the run uses."""
    if config.devices != "auto":
        return config.devices
    return devices.count if devices.kind == "cuda" else 1


def _check(config: ParallelConfig, devices: Devices, count: int) -> None:
    if count > devices.count:
        raise UserError(
            f"--parallel.devices {count}: this machine has {devices.count} {devices.noun}"
            f"{'s' if devices.count != 1 else ''}"
        )
    if config.strategy == "dp":
        if devices.kind == "cpu":
            raise UserError(
                "--parallel.strategy dp: DataParallel feeds several GPUs from one process, and on "
                "the CPU it would do nothing; use ddp, a process for each device"
            )
        if count == 1:
            raise UserError(
                "--parallel.strategy dp: with one GPU there is nothing to share; give "
                "--parallel.devices 2 or more, or none"
            )
    if config.strategy == "none" and count > 1:
        raise UserError(
            f"--parallel.strategy none uses one device, not {count}; use ddp, fsdp or auto"
        )
    if config.strategy in ("ddp", "fsdp") and count == 1:
        raise UserError(
            f"--parallel.strategy {config.strategy} with one device has nothing to share; give "
            "--parallel.devices 2 or more, or start with torchrun"
        )


def devices_at_once(config: ParallelConfig, world: World, *, device: str) -> int:
    """Devices that compute at the same time, on all machines."""
    if world.size == 1 and config.strategy == "dp":
        return num_devices(config, devices_here(device))
    return world.size


def choose_strategy(
    config: ParallelConfig, model: nn.Module, world: World, *, say: Say
) -> StrategyName:
    """Which of the four for a model that is on its device; says which and why.

    Args:
        config: Asks for one, or for auto.
        model: The same on every rank.
        world: Its ranks.
        say: Told in a line.
    """
    device = next(model.parameters()).device
    if world.size == 1 and config.strategy == "dp":
        say(
            f"parallel: dp, {num_devices(config, devices_here(device.type))} GPUs fed by one "
            "process; ddp would be faster: it copies no weights each step, and the first GPU does "
            "not hold everybody's gradients"
        )
        return "dp"
    if world.size == 1:
        say(f"parallel: none, one {'GPU' if device.type == 'cuda' else 'process'}{_idle(device)}")
        return "none"
    name, why = config.strategy, "as asked"
    if name == "auto":
        name, why = _fits(model, device)
    say(f"parallel: {name} over {world.size} ranks ({why})")
    return name


def wrap(
    name: StrategyName,
    model: nn.Module,
    world: World,
    *,
    dp_devices: int,
    dtype: torch.dtype,
) -> Strategy:
    """Put a model into a strategy; from here on its parameters are what an optimizer may hold.

    A batch norm in its head takes the statistics of all ranks from here on.

    Args:
        name: Of the strategy.
        model: On its device, the same on every rank.
        world: Its ranks.
        dp_devices: GPUs that one dp process feeds.
        dtype: Of matrix products.
    """
    strategy: Strategy
    match name:
        case "dp":
            strategy = Replicas(model, world, num_devices=dp_devices, dtype=dtype)
        case "ddp":
            strategy = Distributed(model, world)
        case "fsdp":
            strategy = FullySharded(model, world, dtype=dtype)
        case _:
            strategy = Strategy(model, world)
    if world.size > 1 and any(isinstance(part, BatchNorm) for part in model.modules()):
        synchronized(model, dist.new_group())  # its own: gradients travel at the same time
        strategy.meets_in_passes = True
    return strategy


def _idle(device: torch.device) -> str:
    """What stands idle, if anything, and how to use it."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return ""
    return (
        f"; {torch.cuda.device_count() - 1} more GPUs stand idle, --parallel.devices auto uses them"
    )


def _fits(model: nn.Module, device: torch.device) -> tuple[StrategyName, str]:
    """ddp, or fsdp where weights, gradients and moments would fill a device."""
    num_parameters = sum(p.numel() for p in model.parameters())
    if device.type != "cuda":
        return "ddp", "auto: ranks on CPUs share the memory, so each holds the whole model"
    has = torch.cuda.get_device_properties(device).total_memory
    needed = num_parameters * BYTES_A_PARAMETER
    said = f"weights, gradients and moments need {needed / 2**30:.1f} of {has / 2**30:.0f} GiB"
    if is_worth_sharding(num_parameters, memory_bytes=has):
        return "fsdp", f"auto: {said}"
    return "ddp", f"auto: {said}, so each device holds the whole model"
