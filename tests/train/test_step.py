"""One step: the same however it is cut, safe with no target, and untouched by a bad gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from bertsmith.batch import MaskedBatch, StepShare, pack, unpack
from bertsmith.checkpoint.state import RunState
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train import loop
from bertsmith.train.config import OptimConfig
from bertsmith.train.guard import BadStepError
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.step import (
    StepReport,
    dropout_seed_of,
    train_step,
)

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]
MakePack = Callable[[int, list[int], int], MaskedBatch]
FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
CONFIG = OptimConfig(learning_rate=1e-3)


def step_of(
    model: MaskedLM, optimizer: AdamW, packs: Sequence[MaskedBatch], **changes: object
) -> StepReport:
    """One step with usual settings."""
    settings: dict[str, object] = {
        "compute": FP32,
        "scaler": None,
        "step": 0,
        "seed": 0,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
    }
    strategy, share = Strategy(model, World()), StepShare.of_all(packs)
    return train_step(strategy, share, optimizer, **(settings | changes))  # type: ignore[arg-type]


def at_row(first_row: int, batch: MaskedBatch) -> MaskedBatch:
    """The pack, where so many tokens of the step come before it."""
    return replace(batch, inputs=replace(batch.inputs, first_row=first_row))


def joined(packs: Sequence[MaskedBatch]) -> MaskedBatch:
    """The packs end to end as one."""
    sequences, positions, offset = [], [], 0
    for one in packs:
        sequences += unpack(one.inputs.input_ids_T, one.inputs.starts_N1)
        positions.append(one.positions_M + offset)
        offset += one.num_tokens
    return MaskedBatch(
        inputs=pack(sequences),
        positions_M=torch.cat(positions),
        targets_M=torch.cat([one.targets_M for one in packs]),
    )


def test_three_uneven_packs_equal_one(new_run: NewRun, make_masked_pack: MakePack) -> None:
    """Target counts 2, 9 and 1: a mean of means would weigh them alike. Dropout is on."""
    packs = [
        make_masked_pack(0, [9, 4], 2),
        at_row(13, make_masked_pack(1, [12, 20], 9)),
        at_row(45, make_masked_pack(2, [3], 1)),
    ]
    results = []
    for way in (packs, [joined(packs)]):
        model, optimizer = new_run(CONFIG)
        report = step_of(model, optimizer, way)
        results.append((report, model))
    (split, split_model), (whole, whole_model) = results
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert (split.num_targets, split.num_tokens) == (12, 48)
    for a, b in zip(split_model.parameters(), whole_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_a_step_without_targets_changes_nothing(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, optimizer = new_run(CONFIG)
    before = [p.clone() for p in model.parameters()]
    report = step_of(model, optimizer, [make_masked_pack(0, [5], 0)])
    assert not report.is_applied
    assert (report.loss, report.num_targets, report.num_tokens) == (0.0, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_nan_stops_before_the_update_and_names_the_pack(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, optimizer = new_run(CONFIG)
    with torch.no_grad():
        model.encoder.embeddings.token.weight[7] = torch.nan
    # A pack without targets comes first: it has no loss, and must not shift the blame.
    packs = [make_masked_pack(2, [5], 0), make_masked_pack(0, [6], 2), make_masked_pack(1, [6], 2)]
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(BadStepError, match="loss of step 5 is not finite") as caught:
        step_of(model, optimizer, packs, step=4)
    assert (caught.value.step, caught.value.pack) == (4, 1)
    after = list(model.parameters())
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))
    assert optimizer.updates == 0
    assert all(p.grad is None for p in after)


def test_fp16_overflow_skips_the_update_and_halves_the_scale(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, optimizer = new_run(CONFIG)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [p.clone() for p in model.parameters()]
    report = step_of(model, optimizer, [make_masked_pack(0, [8], 3)], scaler=scaler)
    assert not report.is_applied
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_fp16_scale_grows_after_so_many_good_steps_and_goes_on_where_a_run_was_saved(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, optimizer = new_run(CONFIG)
    fp16 = Compute(device=torch.device("cpu"), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(4):
        pack = make_masked_pack(step, [8], 3)
        assert step_of(model, optimizer, [pack], compute=fp16, scaler=scaler, step=step).is_applied
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0]
    resumed = loop._scaler(fp16, RunState(loss_scale=4096.0, loss_scale_streak=7))
    assert resumed is not None
    assert resumed.get_scale() == 4096.0
    assert resumed.state_dict()["_growth_tracker"] == 7
    assert loop._scaler(FP32, RunState()) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_steps_with_checkpointing_are_those_without_to_the_bit(
    dtype: torch.dtype, new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """fp16 with a scaled loss, in torch's own operations; bf16 in whatever this machine has."""
    found = []
    for mode in ("none", "selective", "full"):
        model, optimizer = new_run(CONFIG)
        model.encoder.checkpoint_blocks((mode, mode))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if dtype == torch.float16 else None
        report = step_of(
            model,
            optimizer,
            [make_masked_pack(0, [8, 12], 6)],
            compute=Compute(device=torch.device("cpu"), dtype=dtype),
            scaler=scaler,
        )
        assert report.is_applied
        found.append([p.detach() for p in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_fp16_gradient_that_overflows_at_any_scale_is_an_error(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, optimizer = new_run(CONFIG)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
    model.bias.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(BadStepError, match="gradient of step 1 is not finite"):
        step_of(model, optimizer, [make_masked_pack(0, [8], 3)], scaler=scaler)
    assert optimizer.updates == 0


def test_a_scaled_loss_is_clipped_as_if_it_were_not_scaled(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    packs = [make_masked_pack(0, [8, 12], 6)]
    reports = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model, optimizer = new_run(CONFIG)
        reports.append(step_of(model, optimizer, packs, scaler=scaler, max_grad_norm=0.01))
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)


def test_dropout_differs_by_step_and_seed_and_repeats() -> None:
    seeds = {dropout_seed_of(seed, step=step) for seed in range(3) for step in range(5)}
    assert len(seeds) == 15
    assert dropout_seed_of(1, step=2) == dropout_seed_of(1, step=2)
