"""The training loop, a function to be read top to bottom.

What to train on, where to write and what to show are the caller's business.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, Self

import torch

from bertsmith.batch import StepShare
from bertsmith.checkpoint.config import SaveConfig
from bertsmith.checkpoint.state import RunState
from bertsmith.memory.fit import halved
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import AbandonedError, World
from bertsmith.train.config import GuardConfig, OptimConfig
from bertsmith.train.guard import BadStepError, is_too_many, spike_limit, with_loss
from bertsmith.train.interruption import Interruption
from bertsmith.train.micro_batch import OutOfMemoryError
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.schedule import learning_rate
from bertsmith.train.step import BatchT, StepReport, train_step
from bertsmith.train.trial import Trial, try_pass

SMOOTHING = 0.9
"""Weight of the past in the smoothed loss."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: exactly one of these is given."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def progress(self, state: RunState) -> float:
        """Share spent, from 0; at 1 the run is done."""
        if self.steps is not None:
            return state.step / self.steps
        if self.tokens is not None:
            return state.tokens / self.tokens
        assert self.seconds is not None
        return state.elapsed_seconds / self.seconds

    def schedule_progress(self, state: RunState) -> float:
        """Progress as the learning rate sees it: a step that fp16 skipped does not move it.

        A budget of time moves on all the same: its schedule ends with the clock.
        """
        if self.seconds is not None or state.step == 0:
            return self.progress(state)
        return self.progress(state) * (state.updates / state.step)


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When something is due: each so many steps, or so many times a run, or minutes apart."""

    every_steps: int | None = None
    times_a_run: int | None = None
    every_seconds: float | None = None

    @classmethod
    def of_saves(cls, config: SaveConfig) -> Self:
        """As a config says."""
        minutes = config.every_minutes
        return cls(
            every_steps=config.every_steps,
            every_seconds=None if minutes is None else minutes * 60.0,
        )

    def is_due(self, step: int, *, before: float, after: float, since_seconds: float) -> bool:
        """Whether it is due after a step.

        Args:
            step: Steps done.
            before: Progress before the step.
            after: Progress after it.
            since_seconds: Time since it was last done.
        """
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        if self.every_steps is None and self.times_a_run is not None:
            return int(after * self.times_a_run) > int(before * self.times_a_run)
        return self.every_seconds is not None and since_seconds >= self.every_seconds


class Hooks(Protocol):
    """What a caller does while training goes on; the loop calls nothing else."""

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        """A step is done."""

    def on_bad_step(self, error: BadStepError, follows: str) -> None:
        """A step's numbers went wrong, or look so; `follows` says in words what is done."""

    def on_out_of_memory(self, step: int, max_tokens: int) -> None:
        """A step did not fit, and is done over with passes of at most so many tokens."""

    def on_trial_out_of_memory(self, max_tokens: int) -> None:
        """The largest pass there can be does not fit; passes have at most so many tokens."""

    def on_rollback(self) -> RunState | None:
        """Go back to the last checkpoint: weights, moments, logs; None if there is none."""
        ...

    def on_evaluate(self, state: RunState) -> RunState:
        """Evaluate, and return the state with its scores brought up to date.

        Raises:
            AbandonedError: A rank was told to stop meanwhile; nothing has changed.
        """
        ...

    def should_stop(self, state: RunState) -> bool:
        """Whether to stop early, asked at the start and after each evaluation."""
        ...

    def on_save(self, state: RunState) -> None:
        """Begin to write a checkpoint, from a copy; may wait for the one before."""

    @property
    def is_saving(self) -> bool:
        """Whether this rank writes a checkpoint at the moment."""
        ...

    @property
    def has_failed_to_save(self) -> bool:
        """Whether this rank has something for `settle_saves` to deal with."""
        ...

    def settle_saves(self, *, is_end: bool) -> bool:
        """Deal with what could not be written; the same on every rank.

        Args:
            is_end: Whether to wait for the save under way first.

        Returns:
            False if the run cannot, or is not to, go on without it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The loop's own settings."""

    budget: Budget
    optim: OptimConfig
    guard: GuardConfig
    seed: int
    largest_pass_tokens: int
    """Of a pack: what one pass has at most."""

    smallest_pass_tokens: int
    """Of the longest sequence, which cannot be cut."""

    evaluate: Cadence
    save: Cadence


Status = Literal["completed", "stopped_early", "interrupted", "not_saved"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training ended."""

    status: Status
    """interrupted: by a signal, and saved. not_saved: what has to be written could not be."""

    state: RunState


def train(
    strategy: Strategy,
    optimizer: AdamW,
    *,
    steps: Callable[[int], Iterator[StepShare[BatchT]]],
    config: LoopConfig,
    compute: Compute,
    state: RunState,
    hooks: Hooks,
    interruption: Interruption,
    trial: Trial[BatchT] | None = None,
) -> Outcome:
    """Train until the budget is spent, an evaluation says stop, or a signal comes.

    Evaluation and saving never change the steps that follow: no randomness is shared, and a step's
    packs, masks and dropout follow from its number alone. A run that ends is evaluated and saved.

    Every rank calls this, and all come to the same steps, evaluations, saves and end: what one rank
    alone knows (the time, a signal, a full disk) is agreed on first.

    A signal is met between packs, in a step or an evaluation: what was begun is left off, and the
    state saved is that of the last whole step. A resumed run does it over, to the bit.

    Args:
        strategy: Holds the model, of which `optimizer` holds the parameters.
        optimizer: Updated in place.
        steps: This rank's packs of step N, N + 1, ... for a start N; closed when training ends.
        config: Budget, schedule and cadences.
        compute: Device and format.
        state: Where to start: a new run's is `RunState()`.
        hooks: Told about each step; evaluates and saves.
        interruption: Read between packs; a stop saves and is no error.
        trial: The largest pass, which is tried before the first step and changes nothing but the
            size of passes.

    Raises:
        BadStepError: Before the weights are touched, where the guard says stop or has no patience.
        OutOfMemoryError: So, where even the longest sequence alone does not fit.
    """
    interruption.defer()
    run = _Run(strategy, optimizer, steps, config, compute, hooks, interruption, state, trial)
    try:
        status = run.until_over()
    except AbandonedError:
        status = "interrupted"
    finally:
        run.close()
    if status != "not_saved" and not run.save_at_the_end():
        status = "not_saved"
    return Outcome(status=status, state=run.state)


class _Run(Generic[BatchT]):
    """One training: where it is, and what moves it on."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: AdamW,
        steps: Callable[[int], Iterator[StepShare[BatchT]]],
        config: LoopConfig,
        compute: Compute,
        hooks: Hooks,
        interruption: Interruption,
        state: RunState,
        trial: Trial[BatchT] | None,
    ) -> None:
        self._trial = trial
        self._strategy, self._optimizer = strategy, optimizer
        self._config, self._compute, self._hooks = config, compute, hooks
        self._interruption = interruption
        self._scaler = _scaler(compute, state)
        self._steps, self._stream = steps, steps(state.step)
        self._clock = _Clock(strategy.world, already_seconds=state.elapsed_seconds)
        self._evaluated_at = -1
        self._is_save_due = False
        self._saved: RunState | None = state if state.step else None
        self._saved_at_seconds = state.elapsed_seconds
        self.state = state

    def until_over(self) -> Status:
        """Train and evaluate until there is nothing left to do.

        Raises:
            AbandonedError: A signal came; the state is one to go on from.
            BadStepError: As `train`.
        """
        ended = self._make_up_for_evaluation()
        # A run that had stopped early and is resumed has nothing left to do.
        if ended is not None or self._hooks.should_stop(self.state):
            return "stopped_early"
        if self._trial is not None and self._config.budget.progress(self.state) < 1.0:
            self._try_largest_pass(self._trial)
        while (before := self._config.budget.progress(self.state)) < 1.0:
            ended = self._turn(before)
            if ended is not None:
                return ended
        if self._evaluated_at != self.state.step:
            self._evaluate()
        return "completed"

    def close(self) -> None:
        """End what makes packs ahead."""
        _close(self._stream)

    def save_at_the_end(self) -> bool:
        """Have the last state on disk; False if it is not."""
        if self._saved is None or not _are_alike(self._saved, self.state):
            self._hooks.on_save(self.state)
        return self._hooks.settle_saves(is_end=True)

    def _turn(self, before: float) -> Status | None:
        """One step, and what is due after it.

        Args:
            before: Progress so far.

        Returns:
            How the run ended; None while it goes on.
        """
        hooks, world = self._hooks, self._strategy.world
        world.beat(f"step {self.state.step + 1:,}")
        is_asked, is_saving, has_failed = world.sums(
            [self._interruption.is_requested, hooks.is_saving, hooks.has_failed_to_save]
        )
        if is_asked:
            raise AbandonedError
        if has_failed and not hooks.settle_saves(is_end=False):
            return "not_saved"
        asked_at_seconds = time.perf_counter()
        share = next(self._stream)
        waited_seconds = time.perf_counter() - asked_at_seconds
        if not self._step(share, waited_seconds=waited_seconds):
            _close(self._stream)
            self._stream = self._steps(self.state.step)
            return self._make_up_for_evaluation()
        after = self._config.budget.progress(self.state)
        if after >= 1.0:  # evaluated and saved at the end
            return None
        is_due = self._config.evaluate.is_due
        if is_due(self.state.step, before=before, after=after, since_seconds=0.0):
            self._evaluate()
            if hooks.should_stop(self.state):
                return "stopped_early"
        self._save_if_due(before, after, is_saving=bool(is_saving))
        return None

    def _make_up_for_evaluation(self) -> Status | None:
        """The evaluation that is owed at a checkpoint, before the step after it; as `_turn`."""
        if not self.state.owes_evaluation:
            return None
        self._evaluate()
        return "stopped_early" if self._hooks.should_stop(self.state) else None

    def _save_if_due(self, before: float, after: float, *, is_saving: bool) -> None:
        """Begin a checkpoint; a slow disk makes them rarer, not steps slower."""
        step, waited = self.state.step, self.state.elapsed_seconds - self._saved_at_seconds
        is_due = self._config.save.is_due
        self._is_save_due |= is_due(step, before=before, after=after, since_seconds=waited)
        if not self._is_save_due or is_saving:
            return
        self._strategy.world.beat(f"the checkpoint of step {step:,}")
        self._hooks.on_save(self.state)
        self._saved, self._is_save_due = self.state, False
        self._saved_at_seconds = self._clock.elapsed_seconds()

    def _step(self, share: StepShare[BatchT], *, waited_seconds: float) -> bool:
        """Train one step, or pass it over.

        Returns:
            False if the run went back to a checkpoint instead, so that other packs come next.

        Raises:
            AbandonedError: A signal came; the state is that of the step before.
            BadStepError, OutOfMemoryError: As `train`.
        """
        state, guard = self.state, self._config.guard
        if state.step + 1 in state.skipped:
            self._pass_over(state.skipped)
            return True
        if self._optimizer.thaw():
            self._strategy.trained_changed()
        limit = math.inf
        if guard.spike != "off":
            limit = spike_limit(state.recent_losses, deviations=guard.spike_deviations)
        try:
            report = train_step(
                self._strategy,
                share,
                self._optimizer,
                compute=self._compute,
                scaler=self._scaler,
                step=state.step,
                seed=self._config.seed,
                learning_rate=learning_rate(
                    self._config.optim,
                    progress=self._config.budget.schedule_progress(state),
                    step=state.updates,
                ),
                max_grad_norm=self._config.optim.max_grad_norm,
                loss_limit=limit if guard.spike in ("skip", "rollback") else math.inf,
                stop_asked=lambda: self._interruption.is_requested,
                micro_batch_tokens=state.micro_batch_tokens,
            )
        except OutOfMemoryError:
            self._hooks.on_out_of_memory(state.step + 1, self._halve())
            return self._step(share, waited_seconds=waited_seconds)
        except BadStepError as error:
            return self._meet(error)
        report = replace(report, seconds=report.seconds + waited_seconds)
        self.state = self._advanced(report)
        self._hooks.on_report(report, self.state, self._config.budget.progress(self.state))
        if report.loss > limit:
            how = f"is a spike: {report.loss:.4f}, where {limit:.4f} was the limit"
            seen = BadStepError(step=state.step, pack=None, what="loss", how=how, is_spike=True)
            self._hooks.on_bad_step(seen, "it was applied all the same (--guard.spike report)")
        return True

    def _evaluate(self) -> None:
        """Evaluate the weights as they are.

        Raises:
            AbandonedError: A signal cut it short; it is owed.
        """
        self._strategy.world.beat(f"the evaluation after step {self.state.step:,}")
        try:
            state = self._hooks.on_evaluate(self.state)
        except AbandonedError:
            self.state = replace(self.state, owes_evaluation=True)
            raise
        self._evaluated_at = state.step
        self.state = replace(
            state, owes_evaluation=False, elapsed_seconds=self._clock.elapsed_seconds()
        )

    def _try_largest_pass(self, trial: Trial[BatchT]) -> None:
        """Find out now whether the largest pass fits, and not when it comes.

        Raises:
            OutOfMemoryError: Not even the smallest does.
        """
        self._strategy.world.beat("the trial of the largest pass")
        while True:
            tokens = self.state.micro_batch_tokens
            try:
                try_pass(trial, self._strategy, self._optimizer, self._compute, max_tokens=tokens)
            except OutOfMemoryError:
                self._hooks.on_trial_out_of_memory(self._halve())
            else:
                return

    def _halve(self) -> int:
        """Take passes of half the size from here on.

        Returns:
            Their most tokens.

        Raises:
            OutOfMemoryError: They cannot be smaller.
        """
        config, state = self._config, self.state
        largest = min(state.micro_batch_tokens or math.inf, config.largest_pass_tokens)
        smaller = halved(int(largest), config.smallest_pass_tokens)
        if smaller is None:
            raise OutOfMemoryError
        self.state = replace(state, micro_batch_tokens=smaller)
        return smaller

    def _meet(self, error: BadStepError) -> bool:
        """Do what the guard says about a bad step; as `_step`."""
        guard = self._config.guard
        policy = guard.spike if error.is_spike else guard.non_finite
        if policy not in ("skip", "rollback"):
            raise error
        skipped = tuple(sorted({*self.state.skipped, error.step + 1}))
        if is_too_many(skipped, patience=guard.patience):
            error.add_note(f"more than {guard.patience} steps went wrong (--guard.patience)")
            raise error
        if policy == "skip":
            self._hooks.on_bad_step(error, "passed over")
            self._pass_over(skipped)
            return True
        went_back_to = self._hooks.on_rollback()
        if went_back_to is None:
            error.add_note("there is no checkpoint to go back to")
            raise error
        self._hooks.on_bad_step(
            error, f"gone back to step {went_back_to.step:,}; it will be passed over"
        )
        # Steps passed over after that checkpoint would go wrong again.
        self.state = replace(
            went_back_to, skipped=skipped, elapsed_seconds=self._clock.elapsed_seconds()
        )
        self._scaler = _scaler(self._compute, self.state)
        return False

    def _pass_over(self, skipped: tuple[int, ...]) -> None:
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            skipped=skipped,
            value=None,
            elapsed_seconds=self._clock.elapsed_seconds(),
        )

    def _advanced(self, report: StepReport) -> RunState:
        """The state after a step."""
        state = self.state
        past = report.loss if state.smoothed_loss is None else state.smoothed_loss
        state = replace(
            state,
            step=report.step,
            updates=state.updates + report.is_applied,
            overflows=state.overflows + report.has_overflowed,
            tokens=state.tokens + report.num_tokens,
            train_seconds=state.train_seconds + report.seconds,
            elapsed_seconds=self._clock.elapsed_seconds(),
            value=None,
        )
        if report.num_targets:  # else the loss is no loss but 0
            state = replace(state, smoothed_loss=SMOOTHING * past + (1.0 - SMOOTHING) * report.loss)
        if self._config.guard.spike != "off" and report.num_targets:
            state = replace(state, recent_losses=with_loss(state.recent_losses, report.loss))
        if self._scaler is None:
            return state
        held = self._scaler.state_dict()
        return replace(
            state, loss_scale=float(held["scale"]), loss_scale_streak=int(held["_growth_tracker"])
        )


class _Clock:
    """Seconds of the whole run, rank 0's on every rank: minutes end for all at once."""

    def __init__(self, world: World, *, already_seconds: float) -> None:
        self._world = world
        self._began_at_seconds = time.perf_counter() - already_seconds

    def elapsed_seconds(self) -> float:
        mine = time.perf_counter() - self._began_at_seconds
        return self._world.sums([mine if self._world.is_main else 0.0])[0]


def _are_alike(one: RunState, other: RunState) -> bool:
    """Whether two states differ in the time alone."""
    return replace(one, elapsed_seconds=0.0) == replace(other, elapsed_seconds=0.0)


def _close(stream: object) -> None:
    """End what a generator does ahead of its reader."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _scaler(compute: Compute, state: RunState) -> torch.amp.GradScaler | None:
    """The loss scaler of an fp16 run, as it was when the run was saved."""
    if compute.dtype != torch.float16:
        return None
    scaler = torch.amp.GradScaler(compute.device.type)
    if state.loss_scale is not None:
        scaler.load_state_dict(
            scaler.state_dict()
            | {"scale": state.loss_scale, "_growth_tracker": state.loss_scale_streak}
        )
    return scaler
