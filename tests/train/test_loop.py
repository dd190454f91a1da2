"""The loop: budgets, cadences, stops; and a resumed run is the run that never stopped."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertsmith.batch import MaskedBatch, StepShare
from bertsmith.hf import load_masked_lm, write_model_files
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.checkpoint import RunState, load_moments, read_state, save_checkpoint
from bertsmith.train.config import OptimConfig
from bertsmith.train.interruption import Interruption, catch_signals
from bertsmith.train.loop import Budget, Cadence, LoopConfig, Outcome, train
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import StepReport

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]
MakePack = Callable[[int, list[int], int], MaskedBatch]
NEVER = Cadence()


class Recorder:
    """Hooks that write down what happened."""

    def __init__(self, folder: Path | None = None) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.evaluated: list[int] = []
        self.saved: list[int] = []
        self.stop_at: int | None = None
        self.on_step: Callable[[int], None] = lambda step: None
        self.folder = folder
        self.model: MaskedLM | None = None
        self.optimizer: AdamW | None = None

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        self.losses.append(report.loss)
        self.rates.append(report.learning_rate)
        self.on_step(state.step)

    def on_evaluate(self, state: RunState) -> RunState:
        torch.rand(7)  # evaluation may use global randomness; training must not notice
        self.evaluated.append(state.step)
        return replace(state, best_step=state.step)

    def should_stop(self, state: RunState) -> bool:
        return state.step == self.stop_at

    def on_save(self, state: RunState) -> None:
        self.saved.append(state.step)
        if self.folder is not None:
            assert self.model is not None
            assert self.optimizer is not None
            model = self.model
            save_checkpoint(
                self.folder,
                state=state,
                moments=list(self.optimizer.named_moments()),
                write_model=lambda folder: write_model_files(folder, model),
                fingerprints={},
            )


def run(
    model: MaskedLM,
    optimizer: AdamW,
    hooks: Recorder,
    make_masked_pack: MakePack,
    *,
    state: RunState | None = None,
    interruption: Interruption | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Outcome:
    """Train on packs that follow from the step."""

    def steps(start: int) -> Iterator[StepShare[MaskedBatch]]:
        while True:
            packs = [make_masked_pack(2 * start + i, [5, 9, 3 + i], 4 + i) for i in range(2)]
            yield StepShare.of_all(packs)
            start += 1

    settings: dict[str, object] = {
        "budget": Budget(steps=12),
        "optim": OptimConfig(learning_rate=1e-2, schedule="cosine"),
        "seed": 3,
        "evaluate": NEVER,
        "save": NEVER,
    }
    hooks.model, hooks.optimizer = model, optimizer
    return train(
        Strategy(model, World()),
        optimizer,
        steps=steps,
        config=LoopConfig(**(settings | changes)),  # type: ignore[arg-type]
        compute=Compute(device=torch.device("cpu"), dtype=dtype),
        state=state or RunState(),
        hooks=hooks,
        interruption=interruption or Interruption(),
    )


def test_a_run_ends_with_its_budget_evaluated_and_saved(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack)
    assert (outcome.status, outcome.state.step, outcome.state.updates) == ("completed", 12, 12)
    assert outcome.state.tokens == sum(2 * (5 + 9) + 3 + 4 for _ in range(12))
    assert (hooks.evaluated, hooks.saved) == ([12], [12])


def test_a_budget_in_tokens_ends_with_the_step_that_spends_it(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, budget=Budget(tokens=71))
    assert outcome.state.step == 3  # 35 tokens a step: 70 are not yet 71


def test_cadences_count_steps_or_share_the_run_out(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    run(
        *new_run(OptimConfig()),
        hooks,
        make_masked_pack,
        evaluate=Cadence(times_a_run=4),
        save=Cadence(every_steps=5),
    )
    assert hooks.evaluated == [3, 6, 9, 12]
    assert hooks.saved == [5, 10, 12]


def test_an_evaluation_can_stop_the_run(new_run: NewRun, make_masked_pack: MakePack) -> None:
    hooks = Recorder()
    hooks.stop_at = 6
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, evaluate=Cadence(every_steps=3))
    assert (outcome.status, outcome.state.step) == ("stopped_early", 6)
    assert (hooks.evaluated, hooks.saved) == ([3, 6], [6])


def test_a_run_that_had_ended_is_judged_again_when_resumed_but_not_trained(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    done = RunState(step=12, updates=12, tokens=426)
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, state=done)
    assert (outcome.status, outcome.state.step) == ("completed", 12)
    assert (hooks.losses, hooks.evaluated, hooks.saved) == ([], [12], [])


def test_a_run_that_had_stopped_early_stays_stopped_when_resumed(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    hooks.stop_at = 6
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, state=RunState(step=6))
    assert (outcome.status, outcome.state.step) == ("stopped_early", 6)
    assert (hooks.losses, hooks.evaluated, hooks.saved) == ([], [], [])


def test_evaluating_never_changes_training(new_run: NewRun, make_masked_pack: MakePack) -> None:
    losses = []
    for evaluate in (NEVER, Cadence(every_steps=1)):
        hooks = Recorder()
        model, optimizer = new_run(OptimConfig())
        run(model, optimizer, hooks, make_masked_pack, evaluate=evaluate)
        losses.append((hooks.losses, [p.detach().clone() for p in model.parameters()]))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_step_and_saves_and_a_second_does_no_harm(
    new_run: NewRun, make_masked_pack: MakePack, signal_number: signal.Signals
) -> None:
    hooks = Recorder()

    def raise_twice(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal_number)
            signal.raise_signal(signal_number)

    hooks.on_step = raise_twice
    before = signal.getsignal(signal_number)
    with catch_signals() as interruption:
        outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, interruption=interruption)
    assert (outcome.status, outcome.state.step, hooks.saved) == ("interrupted", 4, [4])
    assert signal.getsignal(signal_number) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(
    tmp_path: Path,
    new_run: NewRun,
    make_masked_pack: MakePack,
    dtype: torch.dtype,
    stop_at: int,
) -> None:
    """With dropout, at several places, in each format (fp16 with its scaler)."""
    config = OptimConfig()
    straight = Recorder()
    model, optimizer = new_run(config)
    run(model, optimizer, straight, make_masked_pack, dtype=dtype)

    first = Recorder(tmp_path)
    stopped, stopped_optimizer = new_run(config)
    interruption = Interruption()

    def stop(step: int) -> None:
        if step == stop_at:
            interruption.signal_name = "SIGTERM"

    first.on_step = stop
    run(stopped, stopped_optimizer, first, make_masked_pack, dtype=dtype, interruption=interruption)
    path = tmp_path / f"step-{stop_at}"
    state, _ = read_state(path)
    resumed, _ = load_masked_lm(path, seed=99)
    resumed_optimizer = AdamW(group_parameters(resumed, config), config)
    load_moments(path, resumed_optimizer, updates=state.updates)
    second = Recorder()
    outcome = run(resumed, resumed_optimizer, second, make_masked_pack, dtype=dtype, state=state)

    assert first.losses + second.losses == straight.losses
    assert first.rates + second.rates == straight.rates
    assert outcome.state.step == 12
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, mine), (_, theirs) in zip(
        optimizer.named_moments(), resumed_optimizer.named_moments(), strict=True
    ):
        assert torch.equal(mine, theirs), name
