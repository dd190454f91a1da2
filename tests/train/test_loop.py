"""The loop: budgets, cadences, stops; and a resumed run is the run that never stopped."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from bertsmith.batch import LossSum, MaskedBatch, StepShare
from bertsmith.checkpoint.folder import Identity, load_moments, read_state, write_checkpoint
from bertsmith.checkpoint.state import RunState
from bertsmith.hf import load_masked_lm, write_model_files
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import AbandonedError, World
from bertsmith.train.config import GuardConfig, OptimConfig
from bertsmith.train.guard import BadStepError
from bertsmith.train.interruption import Interruption, catch_signals
from bertsmith.train.loop import Budget, Cadence, LoopConfig, Outcome, train
from bertsmith.train.micro_batch import OutOfMemoryError
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import StepReport
from bertsmith.train.trial import Trial
from quiet_hooks import QuietHooks

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]
MakePack = Callable[[int, list[int], int], MaskedBatch]
NEVER = Cadence()


class Recorder(QuietHooks):
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
        self.goes_on_without = True
        self.asked_about_saves: list[bool] = []
        self.bad_steps: list[tuple[int, str]] = []
        self.go_back: Callable[[], RunState] | None = None
        self.out_of_memory: list[tuple[int, int]] = []
        self.in_evaluation: Callable[[], None] = lambda: None

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        self.losses.append(report.loss)
        self.rates.append(report.learning_rate)
        self.on_step(state.step)

    def on_evaluate(self, state: RunState) -> RunState:
        self.in_evaluation()
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
            write_checkpoint(
                self.folder,
                state=state,
                identity=Identity(verb="pretrain", config={}, data={}, versions={}),
                moments=list(self.optimizer.named_moments()),
                write_model=lambda folder: write_model_files(folder, model),
                model_bytes=0,
            )

    def settle_saves(self, *, is_end: bool) -> bool:
        self.asked_about_saves.append(is_end)
        return self.goes_on_without

    def on_out_of_memory(self, step: int, max_tokens: int) -> None:
        self.out_of_memory.append((step, max_tokens))

    def on_trial_out_of_memory(self, max_tokens: int) -> None:
        self.out_of_memory.append((0, max_tokens))

    def on_bad_step(self, error: BadStepError, follows: str) -> None:
        self.bad_steps.append((error.step + 1, follows))

    def on_rollback(self) -> RunState | None:
        return None if self.go_back is None else self.go_back()


def run(
    model: MaskedLM,
    optimizer: AdamW,
    hooks: Recorder,
    make_masked_pack: MakePack,
    *,
    state: RunState | None = None,
    interruption: Interruption | None = None,
    dtype: torch.dtype = torch.float32,
    trial: Trial[MaskedBatch] | None = None,
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
        "guard": GuardConfig(),
        "seed": 3,
        "largest_pass_tokens": 20,
        "smallest_pass_tokens": 9,
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
        trial=trial,
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
    done = RunState(step=12, updates=12, tokens=426, best_step=12)
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
    load_moments(path, resumed_optimizer.named_moments())
    resumed_optimizer.updates = state.updates
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


def stop_in_evaluation(hooks: Recorder, *, at: int) -> Interruption:
    """A signal that comes while the weights of a step are evaluated."""
    interruption = Interruption()

    def stop() -> None:
        if hooks.evaluated == [*range(3, at, 3)] and not interruption.is_requested:
            interruption.signal_name = "SIGTERM"
            raise AbandonedError

    hooks.in_evaluation = stop
    return interruption


def test_an_evaluation_that_a_signal_cuts_short_is_owed_and_made_first(
    tmp_path: Path, new_run: NewRun, make_masked_pack: MakePack
) -> None:
    first = Recorder(tmp_path)
    model, optimizer = new_run(OptimConfig())
    cadence = Cadence(every_steps=3)
    stopped = run(
        model,
        optimizer,
        first,
        make_masked_pack,
        evaluate=cadence,
        interruption=stop_in_evaluation(first, at=6),
    )
    assert (stopped.status, stopped.state.step) == ("interrupted", 6)
    assert (first.evaluated, first.saved) == ([3], [6])
    state, _ = read_state(tmp_path / "step-6")
    assert state.owes_evaluation
    second = Recorder()
    outcome = run(model, optimizer, second, make_masked_pack, evaluate=cadence, state=state)
    assert outcome.status == "completed"
    assert second.evaluated == [6, 9, 12]
    assert not outcome.state.owes_evaluation


def test_a_last_evaluation_that_was_owed_is_saved_again(
    tmp_path: Path, new_run: NewRun, make_masked_pack: MakePack
) -> None:
    first = Recorder(tmp_path)
    model, optimizer = new_run(OptimConfig())
    interruption = stop_in_evaluation(first, at=3)  # nothing is evaluated but the end
    stopped = run(model, optimizer, first, make_masked_pack, interruption=interruption)
    assert (stopped.status, stopped.state.step, first.evaluated) == ("interrupted", 12, [])
    second = Recorder(tmp_path)
    state, _ = read_state(tmp_path / "step-12")
    run(model, optimizer, second, make_masked_pack, state=state)
    assert (second.evaluated, second.saved) == ([12], [12])
    assert not read_state(tmp_path / "step-12")[0].owes_evaluation


def test_a_signal_between_the_packs_of_a_step_leaves_the_step_undone(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks, interruption = Recorder(), Interruption()
    model, optimizer = new_run(OptimConfig())
    packs = 0

    def stop(*args: object) -> None:
        nonlocal packs
        packs += 1
        if packs == 2 * 4 + 1:  # two packs a step: in the first of step 5
            interruption.signal_name = "SIGUSR1"

    handle = model.register_forward_hook(stop)
    before: list[torch.Tensor] = []
    hooks.on_step = lambda step: before.__setitem__(
        slice(None), [p.detach().clone() for p in model.parameters()]
    )
    outcome = run(model, optimizer, hooks, make_masked_pack, interruption=interruption)
    handle.remove()
    assert (outcome.status, outcome.state.step, hooks.saved) == ("interrupted", 4, [4])
    assert packs == 9
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


class Poison:
    """Makes the loss of some steps wrong: what a broken document or chip does."""

    def __init__(self, model: MaskedLM, *, steps: set[int], factor: float) -> None:
        self.packs = 0
        self.handle = model.register_forward_hook(self.act)
        self.steps, self.factor = steps, factor

    def act(self, model: object, inputs: object, output: LossSum) -> LossSum:
        step = self.packs // 2 + 1
        self.packs += 1
        return output._replace(nats=output.nats * (self.factor if step in self.steps else 1.0))


def test_a_bad_step_stops_the_run_by_default(new_run: NewRun, make_masked_pack: MakePack) -> None:
    hooks = Recorder()
    model, optimizer = new_run(OptimConfig())
    Poison(model, steps={5}, factor=float("nan"))
    with pytest.raises(BadStepError, match="loss of step 5 is not finite"):
        run(model, optimizer, hooks, make_masked_pack)
    assert (len(hooks.losses), hooks.saved) == (4, [])


def test_a_bad_step_may_be_passed_over(new_run: NewRun, make_masked_pack: MakePack) -> None:
    """And the steps after it are those of a run that was told beforehand to pass it over."""
    hooks = Recorder()
    model, optimizer = new_run(OptimConfig())
    Poison(model, steps={5}, factor=float("inf"))
    guard = GuardConfig(non_finite="skip")
    outcome = run(model, optimizer, hooks, make_masked_pack, guard=guard)
    assert (outcome.state.step, outcome.state.updates) == (12, 11)
    assert outcome.state.skipped == (5,)
    assert hooks.bad_steps == [(5, "passed over")]

    told = Recorder()
    other, other_optimizer = new_run(OptimConfig())
    run(other, other_optimizer, told, make_masked_pack, state=RunState(skipped=(5,)))
    assert told.losses == hooks.losses
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_after_too_many_bad_steps_the_run_ends(new_run: NewRun, make_masked_pack: MakePack) -> None:
    model, optimizer = new_run(OptimConfig())
    Poison(model, steps={2, 5, 6}, factor=float("nan"))
    guard = GuardConfig(non_finite="skip", patience=2)
    with pytest.raises(BadStepError, match="loss of step 6") as caught:
        run(model, optimizer, Recorder(), make_masked_pack, guard=guard)
    assert caught.value.__notes__ == ["more than 2 steps went wrong (--guard.patience)"]


def test_a_run_goes_back_and_passes_the_bad_step_over_the_next_time(
    tmp_path: Path, new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder(tmp_path)
    model, optimizer = new_run(OptimConfig())

    def go_back() -> RunState:
        path = tmp_path / "step-4"
        stored, _ = load_masked_lm(path, seed=99)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), stored.parameters(), strict=True):
                mine.copy_(theirs)
        load_moments(path, optimizer.named_moments())
        state = read_state(path)[0]
        optimizer.updates = state.updates
        return state

    hooks.go_back = go_back
    Poison(model, steps={7}, factor=float("nan"))  # by pass, so only the first time
    outcome = run(
        model,
        optimizer,
        hooks,
        make_masked_pack,
        save=Cadence(every_steps=4),
        guard=GuardConfig(non_finite="rollback"),
    )
    assert (outcome.state.step, outcome.state.skipped) == (12, (7,))
    assert hooks.bad_steps == [(7, "gone back to step 4; it will be passed over")]
    told = Recorder()
    other, other_optimizer = new_run(OptimConfig())
    run(other, other_optimizer, told, make_masked_pack, state=RunState(skipped=(7,)))
    assert hooks.losses[:4] + hooks.losses[6:] == told.losses
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("policy", ["report", "skip"])
def test_a_spike_is_seen_and_met_as_told(
    new_run: NewRun, make_masked_pack: MakePack, policy: Literal["report", "skip"]
) -> None:
    hooks = Recorder()
    model, optimizer = new_run(OptimConfig())
    Poison(model, steps={36}, factor=1000.0)
    outcome = run(
        model,
        optimizer,
        hooks,
        make_masked_pack,
        budget=Budget(steps=40),
        optim=OptimConfig(learning_rate=1e-4, schedule="constant"),
        guard=GuardConfig(spike=policy),
    )
    assert [step for step, _ in hooks.bad_steps] == [36]
    assert outcome.state.skipped == ((36,) if policy == "skip" else ())
    assert outcome.state.updates == (39 if policy == "skip" else 40)
    assert (max(hooks.losses) > 1000.0) == (policy == "report")


def test_a_slow_disk_makes_saves_rarer_and_holds_up_no_step(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()

    def disk(step: int) -> None:
        hooks.is_saving = 3 <= step < 8  # the save after step 3 takes until step 8

    hooks.on_step = disk
    run(*new_run(OptimConfig()), hooks, make_masked_pack, save=Cadence(every_steps=3))
    assert hooks.saved == [3, 9, 12]


@pytest.mark.parametrize(("goes_on", "status"), [(True, "completed"), (False, "not_saved")])
def test_a_save_that_failed_is_met_as_the_caller_says(
    new_run: NewRun, make_masked_pack: MakePack, goes_on: bool, status: str
) -> None:
    hooks = Recorder()
    hooks.goes_on_without = goes_on

    def disk(step: int) -> None:
        hooks.has_failed_to_save = step == 6

    hooks.on_step = disk
    outcome = run(*new_run(OptimConfig()), hooks, make_masked_pack, save=Cadence(every_steps=5))
    assert outcome.status == status
    assert hooks.asked_about_saves == ([False, True] if goes_on else [False])
    assert outcome.state.step == (12 if goes_on else 6)


def too_large(model: MaskedLM, *, tokens: int) -> None:
    """From now on a pass of more than so many tokens does not fit."""

    def act(model: object, inputs: tuple[MaskedBatch, ...]) -> None:
        if inputs[0].num_tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(act)


def test_a_step_that_does_not_fit_is_done_over_in_smaller_passes_to_the_same_bits(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """As a run that began with them: the packs have 17 and 18 tokens, the longest sequence 9."""
    hooks, told = Recorder(), Recorder()
    model, optimizer = new_run(OptimConfig())
    too_large(model, tokens=10)
    outcome = run(model, optimizer, hooks, make_masked_pack)
    assert hooks.out_of_memory == [(1, 10)]
    assert outcome.state.micro_batch_tokens == 10

    other, other_optimizer = new_run(OptimConfig())
    run(other, other_optimizer, told, make_masked_pack, state=RunState(micro_batch_tokens=10))
    assert told.out_of_memory == []
    assert told.losses == hooks.losses
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )

    whole, whole_optimizer = new_run(OptimConfig())
    straight = Recorder()
    run(whole, whole_optimizer, straight, make_masked_pack)
    assert straight.losses == pytest.approx(hooks.losses, rel=1e-6)


def test_where_the_longest_sequence_does_not_fit_nothing_is_touched(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    model, optimizer = new_run(OptimConfig())
    too_large(model, tokens=8)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OutOfMemoryError):
        run(model, optimizer, hooks, make_masked_pack)
    assert hooks.out_of_memory == [(1, 10), (1, 9)]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_other_errors_are_no_lack_of_memory(new_run: NewRun, make_masked_pack: MakePack) -> None:
    model, optimizer = new_run(OptimConfig())

    def act(*args: object) -> None:
        raise RuntimeError("size mismatch")

    model.register_forward_pre_hook(act)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run(model, optimizer, Recorder(), make_masked_pack)


def test_an_evaluation_that_the_state_gone_back_to_owes_is_made_first(
    tmp_path: Path, new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """And is owed no longer: a run resumed from a later checkpoint does not make it over."""
    model, optimizer = new_run(OptimConfig())
    hooks, cadence = Recorder(tmp_path), Cadence(every_steps=3)
    interruption = stop_in_evaluation(hooks, at=6)
    run(model, optimizer, hooks, make_masked_pack, evaluate=cadence, interruption=interruption)
    state, _ = read_state(tmp_path / "step-6")
    assert state.owes_evaluation

    second = Recorder(tmp_path)
    second.go_back = lambda: state  # no step is made in between, so the weights are those of it
    Poison(model, steps={1}, factor=float("nan"))
    outcome = run(
        model,
        optimizer,
        second,
        make_masked_pack,
        state=state,
        evaluate=cadence,
        save=Cadence(every_steps=8),
        guard=GuardConfig(non_finite="rollback"),
    )
    assert second.bad_steps == [(7, "gone back to step 6; it will be passed over")]
    assert second.evaluated == [6, 6, 9, 12]
    assert outcome.state.skipped == (7,)
    assert not read_state(tmp_path / "step-8")[0].owes_evaluation


def test_a_step_without_a_target_leaves_the_smoothed_loss_as_it_is(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    def run_with(num_targets: int) -> Outcome:
        def pack_of(seed: int, lengths: list[int], usual: int) -> MaskedBatch:
            return make_masked_pack(seed, lengths, num_targets if seed in (4, 5) else usual)

        return run(*new_run(OptimConfig()), Recorder(), pack_of, budget=Budget(steps=3))

    before = run(*new_run(OptimConfig()), Recorder(), make_masked_pack, budget=Budget(steps=2))
    assert run_with(0).state.smoothed_loss == before.state.smoothed_loss
    assert run_with(4).state.smoothed_loss != before.state.smoothed_loss


def trial_of(make_masked_pack: MakePack, *, packs: int = 2, tried: list[int]) -> Trial[MaskedBatch]:
    """Of packs of 20 tokens, or of fewer, in sequences of 9 or less."""

    def largest(max_tokens: int | None) -> MaskedBatch:
        tokens = min(max_tokens or 20, 20)
        tried.append(tokens)
        lengths = [9] * (tokens // 9) + ([tokens % 9] if tokens % 9 else [])
        return make_masked_pack(99, lengths, 5)

    return Trial(largest=largest, packs_per_step=packs, later_bytes=1 << 20)


@pytest.mark.parametrize("packs", [1, 2])
def test_a_trial_changes_no_bit_of_the_run(
    new_run: NewRun, make_masked_pack: MakePack, packs: int
) -> None:
    hooks, straight, tried = Recorder(), Recorder(), list[int]()
    model, optimizer = new_run(OptimConfig())
    other, other_optimizer = new_run(OptimConfig())
    torch.manual_seed(5)
    trial = trial_of(make_masked_pack, packs=packs, tried=tried)
    run(model, optimizer, hooks, make_masked_pack, trial=trial)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    run(other, other_optimizer, straight, make_masked_pack)
    assert torch.equal(drawn, torch.rand(3))
    assert tried == [20]
    assert hooks.losses == straight.losses
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_pass_that_would_not_fit_late_is_met_before_the_first_step(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks, told, tried = Recorder(), Recorder(), list[int]()
    model, optimizer = new_run(OptimConfig())
    too_large(model, tokens=10)
    trial = trial_of(make_masked_pack, tried=tried)
    outcome = run(model, optimizer, hooks, make_masked_pack, trial=trial)
    assert (hooks.out_of_memory, tried) == ([(0, 10)], [20, 10])
    assert outcome.state.micro_batch_tokens == 10
    other, other_optimizer = new_run(OptimConfig())
    run(other, other_optimizer, told, make_masked_pack, state=RunState(micro_batch_tokens=10))
    assert told.losses == hooks.losses


def test_a_trial_that_fits_in_no_size_ends_the_run_before_its_first_step(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    hooks = Recorder()
    model, optimizer = new_run(OptimConfig())
    too_large(model, tokens=8)
    trial = trial_of(make_masked_pack, tried=[])
    with pytest.raises(OutOfMemoryError):
        run(model, optimizer, hooks, make_masked_pack, trial=trial)
    assert hooks.losses == []
    assert all(p.grad is None for p in model.parameters())


def test_a_run_that_is_done_tries_nothing(new_run: NewRun, make_masked_pack: MakePack) -> None:
    tried = list[int]()
    trial = trial_of(make_masked_pack, tried=tried)
    model, optimizer = new_run(OptimConfig())
    run(model, optimizer, Recorder(), make_masked_pack, state=RunState(step=12), trial=trial)
    assert tried == []


def test_what_is_held_later_is_part_of_the_trial(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    trial = replace(trial_of(make_masked_pack, tried=[]), later_bytes=1 << 60)
    with pytest.raises(OutOfMemoryError):
        run(*new_run(OptimConfig()), Recorder(), make_masked_pack, trial=trial)
