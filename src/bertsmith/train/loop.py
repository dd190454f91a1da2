"""The training loop, a function to be read top to bottom.

What to train on, where to write and what to show are the caller's business.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from bertsmith.batch import StepShare
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.checkpoint import RunState
from bertsmith.train.config import OptimConfig
from bertsmith.train.interruption import Interruption
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.schedule import learning_rate
from bertsmith.train.step import BatchT, StepReport, train_step


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

    def on_evaluate(self, state: RunState) -> RunState:
        """Evaluate, and return the state with the best score brought up to date."""
        ...

    def should_stop(self, state: RunState) -> bool:
        """Whether to stop early, asked at the start and after each evaluation."""
        ...

    def on_save(self, state: RunState) -> None:
        """Write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The loop's own settings."""

    budget: Budget
    optim: OptimConfig
    seed: int
    evaluate: Cadence
    save: Cadence


Status = Literal["completed", "stopped_early", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training ended."""

    status: Status
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
) -> Outcome:
    """Train until the budget is spent, an evaluation says stop, or a signal comes.

    Evaluation and saving never change the steps that follow: no randomness is shared, and a step's
    packs, masks and dropout follow from its number alone. A run that ends is evaluated and saved.

    Every rank calls this, and all come to the same steps, evaluations, saves and end: what one rank
    alone knows (the time, a signal) is agreed on first.

    Args:
        strategy: Holds the model, of which `optimizer` holds the parameters.
        optimizer: Updated in place.
        steps: This rank's packs of step N, N + 1, ... for a start N; closed when training ends.
        config: Budget, schedule and cadences.
        compute: Device and format.
        state: Where to start: a new run's is `RunState()`.
        hooks: Told about each step; evaluates and saves.
        interruption: Read between steps; a stop saves and is no error.

    Raises:
        NonFiniteLossError: Before the weights are touched.
    """
    scaler = _scaler(compute, state)
    budget, last_saved_seconds = config.budget, state.elapsed_seconds
    world = strategy.world
    stream = steps(state.step)
    clock = _Clock(world, already_seconds=state.elapsed_seconds)
    evaluated_at, saved_at = -1, state.step if state.step else -1
    # A run that had stopped early and is resumed has nothing left to do.
    status: Status = "stopped_early" if hooks.should_stop(state) else "completed"
    try:
        while status == "completed" and (before := budget.progress(state)) < 1.0:
            world.beat(f"step {state.step + 1:,}")
            if world.sums([interruption.is_requested])[0]:
                status = "interrupted"
                break
            asked_at_seconds = time.perf_counter()
            share = next(stream)
            waited_seconds = time.perf_counter() - asked_at_seconds
            report = train_step(
                strategy,
                share,
                optimizer,
                compute=compute,
                scaler=scaler,
                step=state.step,
                seed=config.seed,
                learning_rate=learning_rate(
                    config.optim, progress=budget.schedule_progress(state), step=state.updates
                ),
                max_grad_norm=config.optim.max_grad_norm,
            )
            report = replace(report, seconds=report.seconds + waited_seconds)
            state = _advance(state, report, scaler, elapsed=clock.elapsed_seconds())
            after = budget.progress(state)
            hooks.on_report(report, state, after)
            if after >= 1.0:
                break
            if config.evaluate.is_due(state.step, before=before, after=after, since_seconds=0.0):
                world.beat(f"the evaluation after step {state.step:,}")
                state, evaluated_at = hooks.on_evaluate(state), state.step
                state = replace(state, elapsed_seconds=clock.elapsed_seconds())
                if hooks.should_stop(state):
                    status = "stopped_early"
                    break
            waited = state.elapsed_seconds - last_saved_seconds
            if config.save.is_due(state.step, before=before, after=after, since_seconds=waited):
                world.beat(f"the checkpoint of step {state.step:,}")
                hooks.on_save(state)
                saved_at = state.step
                last_saved_seconds = clock.elapsed_seconds()
    finally:
        _close(stream)
    if status == "completed" and evaluated_at != state.step:
        state = hooks.on_evaluate(state)
        state = replace(state, elapsed_seconds=clock.elapsed_seconds())
    if saved_at != state.step:
        hooks.on_save(state)
    return Outcome(status=status, state=state)


class _Clock:
    """Seconds of the whole run, rank 0's on every rank: minutes end for all at once."""

    def __init__(self, world: World, *, already_seconds: float) -> None:
        self._world = world
        self._began_at_seconds = time.perf_counter() - already_seconds

    def elapsed_seconds(self) -> float:
        mine = time.perf_counter() - self._began_at_seconds
        return self._world.sums([mine if self._world.is_main else 0.0])[0]


def _close(stream: object) -> None:
    """End what a generator does ahead of its reader."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _advance(
    state: RunState, report: StepReport, scaler: torch.amp.GradScaler | None, *, elapsed: float
) -> RunState:
    """The state after a step."""
    state = replace(
        state,
        step=report.step,
        updates=state.updates + report.is_applied,
        tokens=state.tokens + report.num_tokens,
        train_seconds=state.train_seconds + report.seconds,
        elapsed_seconds=elapsed,
    )
    if scaler is None:
        return state
    held = scaler.state_dict()
    return replace(
        state, loss_scale=float(held["scale"]), loss_scale_streak=int(held["_growth_tracker"])
    )


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
