"""One result on any number of devices: single = accumulation = dp = ddp = fsdp, dropout on.

The packs of a step differ widely in tokens and in targets, and so do the steps in packs.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import Head, Trained, packs_of, train_small
from bertsmith.train.precision import Compute
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
HEADS: tuple[Head, ...] = ("masked language model", "classifier")
A_PACK_A_RANK, UNEVEN = (2,), (6, 5, 1, 3)
"""Packs of the steps, in turns."""

BITWISE_STEPS, ROUNDED_STEPS = 100, 100


def grids() -> list[tuple[tuple[int, ...], int]]:
    return [(A_PACK_A_RANK, BITWISE_STEPS), (UNEVEN, ROUNDED_STEPS)]


def train_everything(world: World) -> dict[Any, Trained]:
    """What a rank does: every head, grid and strategy."""
    names: tuple[StrategyName, ...] = ("ddp", "fsdp")
    return {
        (head, packs, name): train_small(head, name, world, FP32, steps=steps, packs=packs)
        for head in HEADS
        for packs, steps in grids()
        for name in names
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Trained]]:
    return run_ranks(train_everything)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products are rounded by how threads share them out: as many as each rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(one_thread: None) -> dict[Any, Trained]:
    return {
        (head, packs): train_small(head, "none", World(), FP32, steps=steps, packs=packs)
        for head in HEADS
        for packs, steps in grids()
    }


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("head", HEADS)
def test_two_ranks_with_a_pack_each_are_one_process_to_the_bit(
    head: Head, name: str, two_ranks: list[dict[Any, Trained]], alone: dict[Any, Trained]
) -> None:
    wanted, found = alone[head, A_PACK_A_RANK], two_ranks[0][head, A_PACK_A_RANK, name]
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    assert max(wanted.grad_norms) > 0.5, "clipping is at work"
    for key, weight in wanted.weights.items():
        assert torch.equal(found.weights[key], weight), key


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("head", HEADS)
def test_uneven_steps_over_two_ranks_differ_by_rounding_alone(
    head: Head, name: str, two_ranks: list[dict[Any, Trained]], alone: dict[Any, Trained]
) -> None:
    wanted, found = alone[head, UNEVEN], two_ranks[0][head, UNEVEN, name]
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("packs", [A_PACK_A_RANK, UNEVEN])
@pytest.mark.parametrize("head", HEADS)
def test_both_ranks_report_the_same(
    head: Head, packs: tuple[int, ...], name: str, two_ranks: list[dict[Any, Trained]]
) -> None:
    first, second = (ranks[head, packs, name] for ranks in two_ranks)
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("head", HEADS)
def test_dp_replicas_are_one_device_with_any_number_of_packs(
    head: Head, num_devices: int, one_thread: None
) -> None:
    """Odd and tiny steps: fewer packs than devices, and rounds that are not full."""
    packs = (1, 2, 3, 5)
    wanted = train_small(head, "none", World(), FP32, steps=12, packs=packs)
    found = train_small(head, "dp", World(), FP32, steps=12, packs=packs, dp_devices=num_devices)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_two_dp_replicas_with_a_pack_each_are_one_device_to_the_bit(
    head: Head, one_thread: None, alone: dict[Any, Trained]
) -> None:
    found = train_small(
        head, "dp", World(), FP32, steps=BITWISE_STEPS, packs=A_PACK_A_RANK, dp_devices=2
    )
    wanted = alone[head, A_PACK_A_RANK]
    assert found.losses == wanted.losses
    assert all(torch.equal(found.weights[k], w) for k, w in wanted.weights.items())


def test_the_steps_are_as_uneven_as_they_should_be() -> None:
    for head in HEADS:
        packs = packs_of(head, 0, 6)
        assert max(p.num_tokens for p in packs) > 2 * min(p.num_tokens for p in packs)
        assert max(p.num_targets for p in packs) > 2 * min(p.num_targets for p in packs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("head", HEADS)
def test_dp_on_two_gpus_is_one_gpu(head: Head) -> None:
    gpu = Compute(device=torch.device("cuda", 0), dtype=torch.float32)
    wanted = train_small(head, "none", World(), gpu, steps=12, packs=UNEVEN)
    found = train_small(head, "dp", World(), gpu, steps=12, packs=UNEVEN, dp_devices=2)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-4)
