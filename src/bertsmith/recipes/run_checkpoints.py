"""A run's checkpoints while it trains: written in the background, gone back to where need be."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.checkpoint.config import SaveConfig
from bertsmith.checkpoint.folder import (
    Identity,
    load_moments,
    newest_checkpoint,
    read_state,
    retain,
    write_checkpoint,
)
from bertsmith.checkpoint.saver import NonFiniteWeightsError, Saver, Snapshot
from bertsmith.checkpoint.state import RunState
from bertsmith.errors import UserError
from bertsmith.parallel.kept_rows import TrainedRows
from bertsmith.parallel.sharding import fill
from bertsmith.parallel.strategies import Strategy
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import Speaker
from bertsmith.report.run_lock import RunLock
from bertsmith.train.optim import AdamW

ModelT = TypeVar("ModelT", bound=nn.Module)


class WrittenFirst(Protocol):
    """What the disk has to hold before a checkpoint that it leads to."""

    @property
    def is_waiting(self) -> bool:
        """Whether something of it could not be written yet."""
        ...

    def flush_to_disk(self) -> None:
        """Have the disk hold all of it; from any thread.

        Raises:
            NotWrittenError: It does not.
        """
        ...


class RunCheckpoints(Generic[ModelT]):
    """What pretrain and finetune share about saving. Every rank calls it; rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        *,
        config: SaveConfig,
        identity: Identity,
        strategy: Strategy,
        optimizer: AdamW,
        rows: TrainedRows | None,
        write_model: Callable[[Path, ModelT, int], None],
        speaker: Speaker,
        metrics: MetricsLog | None,
        written_first: Sequence[WrittenFirst],
        lock: RunLock | None,
        on_saved: Callable[[RunState], None],
        resumed_from: Path | None,
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: The run's checkpoints folder.
            config: How many are kept, and what a full disk means.
            identity: Of the run.
            strategy: Holds the model.
            optimizer: Its moments are saved.
            rows: Those of the token table that the optimizer trains; None: all.
            write_model: Writes the files of a model at a step into a folder.
            speaker: Says what was saved and what was not.
            metrics: Rank 0's; goes back with the run.
            written_first: What must be on disk before the checkpoint that it leads to.
            lock: Rank 0's, without which it must not write.
            on_saved: Told, in another thread, when a checkpoint is safe.
            resumed_from: The checkpoint that the run goes on from, if it does.
        """
        self._folder, self._config, self._identity = folder, config, identity
        self._strategy, self._world, self._optimizer = strategy, strategy.world, optimizer
        self._rows, self._write_model, self._speaker = rows, write_model, speaker
        self._metrics, self._written_first = metrics, written_first
        self._lock, self._on_saved, self._resumed_from = lock, on_saved, resumed_from
        self._saver = Saver()
        self._snapshot: Snapshot[ModelT] | None = None

    @property
    def is_saving(self) -> bool:
        """Whether this rank writes one now."""
        return self._saver.is_busy

    @property
    def last_saved(self) -> Path | None:
        """The newest one that is safe, of this start."""
        return self._saver.last_saved

    @property
    def has_failed(self) -> bool:
        """Whether there is something for `settle` to deal with."""
        is_lost = self._lock is not None and self._lock.is_lost
        return self._saver.has_failed or self._has_to_stop or is_lost

    @property
    def _has_to_stop(self) -> bool:
        """Whether something else could not be written, and the run is not to go on without."""
        has_to = self._config.on_disk_error == "stop"
        return has_to and any(first.is_waiting for first in self._written_first)

    def save(self, model: ModelT, state: RunState) -> None:
        """Copy the run and begin to write it.

        Args:
            model: With its whole token table.
            state: Where the run is.
        """
        whole = self._strategy.whole_model(model)
        moments = self._strategy.whole_tensors(self._optimizer.named_moments())
        if not self._world.is_main:
            return
        whole_moments = moments if self._rows is None else self._rows.whole(moments)
        self.wait()  # its copy is about to be overwritten
        if self._snapshot is None:
            self._snapshot = Snapshot(whole)
        snapshot = self._snapshot
        snapshot.take(whole, whole_moments)

        def write() -> Path:
            self._check_lock()
            snapshot.check_finite()
            self._write_first(state.step)
            path = write_checkpoint(
                self._folder,
                state=state,
                identity=self._identity,
                moments=snapshot.moments,
                write_model=lambda fresh: self._write_model(fresh, snapshot.model, state.step),
                model_bytes=snapshot.num_bytes,
            )
            self._check_lock()
            retain(
                self._folder,
                step=state.step,
                keep_last=self._config.keep_last,
                keep_best=self._config.keep_best,
            )
            self._speaker.log(f"saved {path}")
            return path

        def write_to_the_end() -> Path:
            with self._world.saving():
                return write()

        self._saver.begin(write_to_the_end, then=lambda: self._on_saved(state))

    def settle(self, *, is_end: bool) -> bool:
        """Deal with what could not be written; at the end, wait for the last save first.

        Returns:
            False, on every rank, if the run is to end resumable from an earlier checkpoint.

        Raises:
            UserError: On every rank: weights or moments are not finite, or the folder is another
                run's by now.
        """

        def deal() -> bool:
            if is_end:
                self._saver.finish()
            self._check_lock()
            return self._deal_with(self._saver.take_errors(), is_end=is_end)

        return self._world.on_main(deal)

    def wait(self) -> None:
        """Let a save that is under way come to its end, whatever that is."""
        with self._world.working("the wait for a checkpoint to be written"):
            self._saver.finish()

    def go_back(self, load_model: Callable[[Path], ModelT], model: ModelT) -> RunState | None:
        """Take the run back to its newest checkpoint; None, and nothing changes, without one.

        Args:
            load_model: Reads a checkpoint's model.
            model: Gets its parameters and buffers; has its whole token table.
        """

        def find() -> str | None:
            self._saver.finish()
            self._check_lock()
            path = newest_checkpoint(self._folder, self._speaker.say)
            return None if path is None else str(path)

        found = self._world.on_main(find)
        if found is None:
            return None
        path = Path(found)
        state = read_state(path)[0]
        stored = load_model(path)
        with torch.no_grad():
            values = dict(stored.named_parameters())
            for name, parameter in model.named_parameters():
                fill(parameter, values[name])
            buffers = dict(stored.named_buffers())
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        load_moments(path, self._optimizer.named_moments(), rows=self._rows)
        self._optimizer.updates = state.updates
        if self._metrics is not None:
            self._metrics.rewind(state.step, is_judged_again=state.owes_evaluation)
        return state

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _write_first(self, step: int) -> None:
        """Have the disk hold what leads to a checkpoint.

        Raises:
            NotWrittenError: It does not, so that the checkpoint must not be written either.
        """
        for first in self._written_first:
            try:
                first.flush_to_disk()
            except NotWrittenError as error:
                raise NotWrittenError(
                    f"{self._folder / f'step-{step}'}: the checkpoint was not written, as it would "
                    f"speak of what is not there: {error}"
                ) from error

    def _deal_with(self, errors: list[Exception], *, is_end: bool) -> bool:
        """Say what failed; whether the run may go on, or has ended well."""
        for error in errors:
            match error:
                case NonFiniteWeightsError():
                    raise UserError(f"{error}; {self._what_stands()}; try a lower learning rate")
                case NotWrittenError():
                    self._speaker.say(f"{error}; {self._what_stands()}")
                case _:
                    raise error
        if is_end:
            return self._saver.has_saved_last and not self._has_to_stop
        return self._config.on_disk_error == "continue" or not (errors or self._has_to_stop)

    def _what_stands(self) -> str:
        last = self._saver.last_saved or self._resumed_from
        return f"{last} stands" if last else "there is no earlier one"
