"""A training run from its first line to its last status: what pretrain and finetune share."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from bertsmith.batch import StepShare
from bertsmith.checkpoint.folder import Identity
from bertsmith.checkpoint.state import RunState
from bertsmith.errors import UserError
from bertsmith.memory.devices import said_bytes
from bertsmith.memory.here import fenced
from bertsmith.parallel import last_word
from bertsmith.parallel.ending import is_of_the_network
from bertsmith.parallel.heart import OtherRankFailedError
from bertsmith.parallel.kept_rows import TrainedRows
from bertsmith.parallel.place import program_of
from bertsmith.parallel.strategies import Strategy
from bertsmith.recipes.config import TrainingConfig
from bertsmith.recipes.planned_run import PlannedRun
from bertsmith.recipes.run_checkpoints import RunCheckpoints, WrittenFirst
from bertsmith.report.devices import BusySampler, DeviceUse, devices_of, uses_of
from bertsmith.report.metrics_log import MetricsLog, open_metrics
from bertsmith.report.progress import Speaker, TrainingDisplay
from bertsmith.report.run_folder import peak_memory_bytes, write_config, write_summary
from bertsmith.report.run_lock import RunLock
from bertsmith.report.run_status import RunStatus, Status, resume_command, write_status
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.guard import BadStepError
from bertsmith.train.interruption import Interruption
from bertsmith.train.layer_rates import PartPlan
from bertsmith.train.loop import LoopConfig, Outcome, train
from bertsmith.train.micro_batch import LoneOutOfMemoryError, OutOfMemoryError
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.step import BatchT, StepReport
from bertsmith.train.trial import Trial

ModelT = TypeVar("ModelT", bound=nn.Module)
SummaryT = TypeVar("SummaryT")


@dataclass(frozen=True, kw_only=True)
class Rig:
    """What a run trains with, ready to go."""

    folder: Path
    """The run folder, open for us alone."""

    speaker: Speaker
    compute: Compute
    strategy: Strategy
    optimizer: AdamW
    at_once: int
    """Devices that compute at the same time, on all machines."""

    resumed_from: Path | None
    """The checkpoint that weights and moments come from; None for a new run."""

    is_changed: bool
    """Whether the run goes on with other settings or data than that checkpoint has."""

    rows: TrainedRows | None
    """Those of the token table that the optimizer trains; None: all, or none of a frozen table."""

    parts: Mapping[str, PartPlan]
    """How each part of the model is trained."""

    lock: RunLock | None
    """On the run folder; None on ranks that write nothing."""

    interruption: Interruption

    planned: PlannedRun | None
    """Its memory; None where that could not be planned."""


class TrainingRun(ABC, Generic[ModelT, SummaryT]):
    """The loop's hooks, as far as they do not depend on the task."""

    def __init__(
        self,
        rig: Rig,
        model: ModelT,
        state: RunState,
        *,
        identity: Identity,
        settings: TrainingConfig,
    ) -> None:
        """Nothing is written yet.

        Args:
            rig: What it trains with; its strategy holds the model.
            model: To be trained.
            state: Where it starts.
            identity: What a continuation has to agree with.
            settings: Of the run.
        """
        if rig.planned is not None:
            state = replace(state, micro_batch_tokens=rig.planned.micro_batch_tokens)
        self._rig, self._model, self.state = rig, model, state
        self._folder, self._speaker, self._compute = rig.folder, rig.speaker, rig.compute
        self._strategy, self._world = rig.strategy, rig.strategy.world
        self._identity, self._settings = identity, settings
        self._owes_config = rig.is_changed
        self._uses: list[DeviceUse] = []
        self._log: TrainingLog | None = None
        self._checkpoints: RunCheckpoints[ModelT] | None = None
        self._move_fence: Callable[[], None] = lambda: None

    @abstractmethod
    def say_banner(self) -> None:
        """What is about to run, before time is spent on it."""

    @abstractmethod
    def new_log(self, metrics: MetricsLog | None, display: TrainingDisplay) -> TrainingLog:
        """A log for this task; measures the machine's limit, which takes a moment."""

    @abstractmethod
    def on_evaluate(self, state: RunState) -> RunState:
        """As the loop's hook."""

    @abstractmethod
    def should_stop(self, state: RunState) -> bool:
        """As the loop's hook."""

    @abstractmethod
    def documents_of(self, error: BadStepError) -> str:
        """Which documents or rows a bad step learned from, a few by name."""

    @abstractmethod
    def load_model(self, checkpoint: Path) -> ModelT:
        """The model of one of the run's checkpoints."""

    @abstractmethod
    def write_model(self, folder: Path, model: ModelT, step: int) -> None:
        """Write a checkpoint's model files."""

    @abstractmethod
    def conclude(self, outcome: Outcome) -> SummaryT:
        """Write the model, the summary and the card, or say how the run stands."""

    @abstractmethod
    def summarize(self, status: str, state: RunState) -> SummaryT:
        """Write `summary.json`."""

    @property
    def written_first(self) -> Sequence[WrittenFirst]:
        """What else, besides metrics, must be on disk before a checkpoint."""
        return ()

    @property
    def rate_shares(self) -> dict[str, float]:
        """Each part's learning rate over that of the schedule, where they differ."""
        shares = {part: plan.share for part, plan in self._rig.parts.items()}
        return shares if len(set(shares.values())) > 1 else {}

    def in_whole(self) -> AbstractContextManager[None]:
        """Within the block the model is the whole one."""
        return nullcontext()

    def carry_out(
        self,
        steps: Callable[[int], Iterator[StepShare[BatchT]]],
        settings: LoopConfig,
        largest: Callable[[int], BatchT],
    ) -> SummaryT:
        """Train, and leave the run folder telling how that ended, however it does.

        Args:
            steps: As `train`.
            settings: The loop's.
            largest: A pass of so many tokens that needs as much memory as any.

        Raises:
            UserError: A step's numbers went wrong, or the disk did.
        """
        # A signal to any rank waits for all of them from here on: they find it before step 1.
        self._rig.interruption.defer()
        self.say_banner()
        self._say_plan()
        self._stand("running")
        try:
            with self._within_cgroup() as self._move_fence:
                return self._train(steps, settings, self._trial(settings, largest))
        except BadStepError as error:
            text = self._explain(error)
            self._fail(text)
            raise UserError(text) from error
        except OutOfMemoryError as error:
            text = self._explain_out_of_memory()
            self._fail(text)
            raise UserError(text) from error
        except LoneOutOfMemoryError as error:
            text = self._how_to_fit(error, settings)
            if smaller := self._smaller_pass(settings):
                last_word.ask_again(["--resume", "--overwrite=false", f"--micro_batch={smaller}"])
            self._fail(text)
            raise UserError(text) from error
        except Exception as error:
            of_another = isinstance(error, OtherRankFailedError) or is_of_the_network(error)
            self._fail(
                "another rank was lost" if of_another else str(error) or type(error).__name__
            )
            raise

    def _train(
        self,
        steps: Callable[[int], Iterator[StepShare[BatchT]]],
        settings: LoopConfig,
        trial: Trial[BatchT],
    ) -> SummaryT:
        rig = self._rig
        with (
            open_metrics(
                self._world,
                rig.folder,
                steps_done=self.state.step,
                say=self._speaker.say,
                is_judged_again=self._is_judged_at_start(settings),
            ) as metrics,
            TrainingDisplay(self._speaker) as display,
            BusySampler(devices_of(rig.compute.device, rig.at_once, self._world)) as sampler,
        ):
            if rig.lock is not None:
                rig.lock.when_lost(self._speaker.leave_folder)
                if metrics is not None:
                    rig.lock.when_lost(metrics.leave_folder)
            self._log = self.new_log(metrics, display)
            self._checkpoints = RunCheckpoints(
                rig.folder / "checkpoints",
                config=self._settings.save,
                identity=self._identity,
                strategy=rig.strategy,
                optimizer=rig.optimizer,
                rows=rig.rows,
                write_model=self.write_model,
                speaker=self._speaker,
                metrics=metrics,
                written_first=[*self.written_first, *([] if metrics is None else [metrics])],
                lock=rig.lock,
                on_saved=self._note_saved,
                resumed_from=rig.resumed_from,
            )
            try:
                if rig.is_changed:  # or the checkpoint would say something else than the config
                    self.on_save(self.state)
                outcome = train(
                    rig.strategy,
                    rig.optimizer,
                    steps=steps,
                    config=settings,
                    compute=rig.compute,
                    state=self.state,
                    hooks=self,
                    interruption=rig.interruption,
                    trial=trial,
                )
            finally:
                self._checkpoints.wait()
            self.state = outcome.state
            if outcome.status == "not_saved" and not self._world.on_main(self._has_checkpoint):
                raise UserError(
                    f"{self._folder}: no checkpoint could be written, so nothing is saved; free "
                    "space, or name another --output"
                )
            self._uses = uses_of(sampler, rig.compute.device, self._world)
            if len(self._uses) > 1:
                for number, use in enumerate(self._uses):
                    self._speaker.say(f"device {number}: {use}")
            summary, outcome = self._concluded(outcome)
            self._say_peak()
            self._stand_at_the_end(outcome)
            return summary

    def _concluded(self, outcome: Outcome) -> tuple[SummaryT, Outcome]:
        """`conclude`; a run whose results the disk has no room for can go on to write them.

        Raises:
            UserError: On every rank.
        """
        try:
            return self.conclude(outcome), outcome
        except UserError as error:
            if outcome.status in ("interrupted", "not_saved"):
                raise
            self._speaker.say(str(error))
        unsaved = replace(outcome, status="not_saved")
        return self.conclude(unsaved), unsaved

    def _is_judged_at_start(self, settings: LoopConfig) -> bool:
        """Whether the loop evaluates the weights that it starts with."""
        is_done = settings.budget.progress(self.state) >= 1.0
        return self.state.owes_evaluation or (is_done and not self.should_stop(self.state))

    def _note_saved(self, state: RunState) -> None:
        """A checkpoint is safe; in the thread that wrote it."""
        self._stand("running", at=state)
        if self._owes_config:
            self._owes_config = False
            with suppress(UserError):  # what it accepts besides does no harm
                write_config(self._folder, self._settings)

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        """Show the step, and log one in so many."""
        assert self._log is not None
        self.state = state
        self._log.report(report, state, progress)

    def on_bad_step(self, error: BadStepError, follows: str) -> None:
        """Say on what it happened, and what is done."""
        self._speaker.say(f"{error}, on {self.documents_of(error)}: {follows}")

    def on_out_of_memory(self, step: int, max_tokens: int) -> None:
        """Say that passes get smaller."""
        self._move_fence()
        self._speaker.say(
            f"step {step:,}: out of memory; done over with at most {max_tokens:,} tokens in one "
            "pass, which changes nothing but rounding"
        )

    def on_trial_out_of_memory(self, max_tokens: int) -> None:
        """Say that passes are smaller than planned."""
        self._move_fence()
        self._speaker.say(
            "out of memory in the trial of the largest pass, before the first step; passes have at "
            f"most {max_tokens:,} tokens, which changes nothing but rounding"
        )

    def on_rollback(self) -> RunState | None:
        """Go back to the newest checkpoint."""
        with self.in_whole():
            state = self._saves.go_back(self.load_model, self._model)
        if state is not None:
            self.state = state
        return state

    def on_save(self, state: RunState) -> None:
        """Begin a checkpoint."""
        self.state = state
        with self.in_whole():
            self._saves.save(self._model, state)

    @property
    def is_saving(self) -> bool:
        """Whether this rank writes one."""
        return self._saves.is_saving

    @property
    def has_failed_to_save(self) -> bool:
        """Whether this rank could not."""
        return self._saves.has_failed

    def settle_saves(self, *, is_end: bool) -> bool:
        """Deal with what could not be written."""
        return self._saves.settle(is_end=is_end)

    @property
    def planned_peak_bytes(self) -> int | None:
        """What was planned for the passes that the run takes now, as `peak_memory_bytes` counts."""
        planned = self._rig.planned
        return (
            None if planned is None else planned.planned_peak_bytes(self.state.micro_batch_tokens)
        )

    def _say_plan(self) -> None:
        planned = self._rig.planned
        if planned is None:
            self._speaker.say("memory: not planned, as the planner does not know such a run")
            return
        for line in planned.lines():
            self._speaker.say(line)

    def _say_peak(self) -> None:
        measured, planned = peak_memory_bytes(self._compute.device), self.planned_peak_bytes
        self._speaker.say(
            f"memory: {said_bytes(measured)} at most were used"
            + ("" if planned is None else f", {said_bytes(planned)} were planned")
            + (" (of tensors)" if self._compute.device.type == "cuda" else " (of the process)")
        )

    def _within_cgroup(self) -> AbstractContextManager[Callable[[], None]]:
        planned, is_on_cpu = self._rig.planned, self._compute.device.type == "cpu"
        return (
            fenced(planned.room) if planned is not None and is_on_cpu else nullcontext(lambda: None)
        )

    def _trial(self, settings: LoopConfig, largest: Callable[[int], BatchT]) -> Trial[BatchT]:
        planned = self._rig.planned

        def of_at_most(max_tokens: int | None) -> BatchT:
            whole = settings.largest_pass_tokens
            tokens = whole if max_tokens is None else min(whole, max_tokens)
            return largest(max(tokens, settings.smallest_pass_tokens))

        return Trial(
            largest=of_at_most,
            packs_per_step=1 if planned is None else planned.shape.packs_per_step,
            later_bytes=0 if planned is None else planned.later_bytes,
        )

    @property
    def _saves(self) -> RunCheckpoints[ModelT]:
        assert self._checkpoints is not None, "training has begun"
        return self._checkpoints

    @property
    def _newest_checkpoint(self) -> Path | None:
        saved = None if self._checkpoints is None else self._checkpoints.last_saved
        return saved or self._rig.resumed_from

    @property
    def stop_asked(self) -> Callable[[], bool]:
        """Whether this rank was told to stop, for whatever takes long."""
        return lambda: self._rig.interruption.is_requested

    def _explain(self, error: BadStepError) -> str:
        """One line about the step that ended the run."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        good = self._newest_checkpoint
        return (
            f"{error}{notes}, on {self.documents_of(error)}; weights were not updated, "
            f"{good or 'what was saved before'} stands; try a lower --optim.learning_rate, or "
            "--guard.non_finite skip or rollback"
        )

    def _how_to_fit(self, error: LoneOutOfMemoryError, settings: LoopConfig) -> str:
        """One line about a step that did not fit, and that cannot be done over by itself."""
        smaller = self._smaller_pass(settings)
        advice = (
            f"go on with --resume --micro_batch {smaller}, which changes nothing but rounding"
            if smaller
            else "--checkpointing full, --precision bf16 or shorter sequences need less"
        )
        return (
            f"out of memory at step {self.state.step + 1:,}, on rank {error.rank}, while the other "
            f"ranks wait for it inside the pass ({self._strategy.name}), so that the step cannot "
            f"be done over; {advice}"
        )

    def _smaller_pass(self, settings: LoopConfig) -> int | None:
        """Tokens of a pass of half the size; None where it has the smallest already."""
        largest = self.state.micro_batch_tokens or settings.largest_pass_tokens
        smaller = max(largest // 2, settings.smallest_pass_tokens)
        return smaller if smaller < largest else None

    def _explain_out_of_memory(self) -> str:
        """The breakdown into the log, and one line with what to do."""
        planned = self._rig.planned
        advice = (
            "--checkpointing full, --precision bf16, shorter sequences or --parallel.strategy fsdp "
            "need less"
        )
        if planned is not None:
            for line in planned.breakdown():
                self._speaker.say(line)
            advice = planned.advice()
        return (
            f"out of memory at step {self.state.step + 1:,}, even with one sequence at a time; "
            f"{advice}"
        )

    def _has_checkpoint(self) -> bool:
        return self._newest_checkpoint is not None

    def check_folder(self) -> None:
        """Before rank 0 writes what must not replace another run's.

        Raises:
            LostLockError: Another run has taken the folder over.
        """
        if self._rig.lock is not None:
            self._rig.lock.check()

    @property
    def _may_write(self) -> bool:
        """Whether this rank is the one that writes, and the folder still the run's."""
        lock = self._rig.lock
        return self._world.is_main and (lock is None or lock.is_held())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, on the rank that writes.

        Raises:
            UserError: On every rank: it cannot be written, of a run that is done; of another that
                is said alone. A folder that is another run's by now is left alone.
        """

        def write() -> bool:
            if self._may_write:
                write_summary(self._folder, summary)
            return True

        if summary["status"] == "completed":
            self._world.on_main(write)
        elif self._world.is_main:
            try:
                write()
            except UserError as error:
                self._speaker.say(str(error))  # how the run stands is what there is to tell

    def say_how_to_go_on(self, outcome: Outcome) -> None:
        """After an end that is not the run's own."""
        command = self._command
        if outcome.status == "interrupted":
            self._speaker.say(
                f"interrupted at step {outcome.state.step:,}; saved. Go on with: {command}"
            )
        else:
            newest, step = self._newest_checkpoint, outcome.state.step
            is_saved = newest is not None and newest.name == f"step-{step}"
            lacks = "which is saved, but its results are not" if is_saved else "which is not saved"
            self._speaker.say(
                f"ended at step {step:,}, {lacks}. Once the disk has room, go on from {newest} "
                f"with: {command}"
            )

    @property
    def _command(self) -> str:
        """What goes on with the run."""
        return resume_command(self._identity.verb, self._folder, program=program_of(os.environ))

    def _stand_at_the_end(self, outcome: Outcome) -> None:
        match outcome.status:
            case "interrupted":
                name = self._rig.interruption.signal_name or "a signal to another rank"
                self._stand("resumable", reason=f"stopped by {name}")
            case "not_saved":
                self._stand("resumable", reason="what has to be saved could not be written")
            case _:
                self._stand("completed")

    def _fail(self, reason: str) -> None:
        self.summarize("failed", self.state)
        self._stand("failed", reason=reason)

    def _stand(
        self, status: Status, *, reason: str | None = None, at: RunState | None = None
    ) -> None:
        """Write how the run stands; a world has one who does."""
        if not self._may_write:
            return
        checkpoint = self._newest_checkpoint
        write_status(
            self._folder,
            RunStatus(
                status=status,
                verb=self._identity.verb,
                step=(at or self.state).step,
                checkpoint=None if checkpoint is None else f"checkpoints/{checkpoint.name}",
                command=None if status == "completed" else self._command,
                reason=reason,
            ),
            log=self._speaker.log,
        )
