"""Passes as planned at the start of a run: what is chosen, agreed on, refused and said."""

from dataclasses import replace

import pytest
import torch

from bertsmith.checkpoint.state import RunState
from bertsmith.errors import UserError
from bertsmith.memory.formula import FIXED_BYTES, STILL_TO_COME_BYTES, held_bytes
from bertsmith.memory.here import Limit
from bertsmith.memory.shapes import RunShape
from bertsmith.model.config import PRESETS
from bertsmith.parallel.world import World
from bertsmith.recipes import planned_run
from bertsmith.recipes.planned_run import PlannedRun, plan_run
from bertsmith.train.precision import Compute
from ranks import run_ranks

GIB = 1 << 30
BASE = RunShape(
    encoder=PRESETS["bert-base"],
    task="masked_lm",
    tokens_per_pack=16384,
    longest=512,
    read_share=0.15,
    body="plain",
    packs_per_step=2,
)
CPU = Compute(device=torch.device("cpu"), dtype=torch.float32)


def planned(
    monkeypatch: pytest.MonkeyPatch | None,
    num_bytes: int,
    *,
    micro_batch: int | str = "auto",
    state: RunState | None = None,
    world: World | None = None,
    is_certain: bool = True,
    resident_bytes: int | None = None,
) -> PlannedRun:
    """A run of bert-base in packs of 16,384 tokens, with so much room.

    What is resident of the test's own process, which earlier tests filled, is not asked.
    """
    limit = Limit(num_bytes=num_bytes, why="a test", is_certain=is_certain)
    patch = monkeypatch or pytest.MonkeyPatch()
    patch.setattr(planned_run, "cpu_room", lambda: limit)
    patch.setattr(planned_run, "resident_bytes", lambda: resident_bytes)
    found = plan_run(
        lambda: BASE,
        micro_batch=micro_batch,  # type: ignore[arg-type]
        smallest_tokens=512,
        compute=CPU,
        world=world or World(),
        state=state or RunState(),
    )
    assert found is not None
    return found


def test_the_largest_rung_that_safely_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, 100 * GIB).micro_batch_tokens is None
    found = planned(monkeypatch, 12 * GIB)
    tokens = found.micro_batch_tokens
    assert tokens in (8192, 4096, 2048, 1024)
    assert found.plan(tokens).safe_bytes <= found.limit_bytes < found.plan(2 * tokens).safe_bytes
    assert f"passes of at most {tokens:,} tokens" in found.lines()[1]


def test_what_was_asked_for_is_kept_and_what_was_halved_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = RunState(micro_batch_tokens=3000)
    assert planned(monkeypatch, GIB, micro_batch=3000, state=asked).micro_batch_tokens == 3000
    resumed = RunState(step=5, micro_batch_tokens=1024)
    assert planned(monkeypatch, 100 * GIB, state=resumed).micro_batch_tokens == 1024


def test_what_is_surely_impossible_says_the_least_need_and_what_would_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=r"the least that this run needs is .* in passes of 512"):
        planned(monkeypatch, 1 << 20)
    # Others may give back memory that is merely not free.
    assert planned(monkeypatch, 1 << 20, is_certain=False).micro_batch_tokens == 512
    breakdown = "\n".join(planned(monkeypatch, 1 << 20, is_certain=False).breakdown())
    assert "optimizer moments" in breakdown
    assert "--checkpointing full" in breakdown


def test_no_run_fails_for_want_of_a_plan() -> None:
    def unknown() -> RunShape:
        raise KeyError("a model of another kind")

    found = plan_run(
        unknown,
        micro_batch="auto",
        smallest_tokens=512,
        compute=CPU,
        world=World(),
        state=RunState(),
    )
    assert found is None


def test_the_measure_is_that_of_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory on a CPU, that of tensors on a GPU."""
    on_cpu = planned(monkeypatch, 100 * GIB)
    on_gpu = replace(on_cpu, shape=replace(BASE, device="cuda"))
    assert on_cpu.planned_peak_bytes(None) == on_cpu.plan(None).safe_bytes
    assert on_gpu.planned_peak_bytes(None) == on_gpu.plan(None).peak_bytes


def test_what_the_process_holds_beside_its_model_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gigabyte of texts counts; less than any run takes does not."""
    young = planned(monkeypatch, 100 * GIB, resident_bytes=held_bytes(BASE) + 1)
    assert young.plan(None).fixed_bytes == FIXED_BYTES["cpu"]
    model_and_data = held_bytes(BASE) + GIB
    found = planned(monkeypatch, 100 * GIB, resident_bytes=model_and_data)
    assert found.plan(None).fixed_bytes == GIB + STILL_TO_COME_BYTES["cpu"]
    assert found.limit_bytes == 100 * GIB + model_and_data
    unknown = planned(monkeypatch, 100 * GIB, resident_bytes=None)  # no Linux
    assert unknown.shape == BASE


def poorer_second_rank(world: World) -> int | None:
    return planned(None, (100, 12)[world.rank] * GIB, world=world).micro_batch_tokens


def test_all_ranks_take_the_passes_of_the_poorest(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = planned(monkeypatch, 12 * GIB // 2).micro_batch_tokens  # two share a machine
    assert expected is not None
    assert run_ranks(poorer_second_rank) != [None, None]
    first, second = run_ranks(poorer_second_rank)
    assert first == second
