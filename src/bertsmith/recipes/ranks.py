"""What pretrain and finetune share about running as one rank of several."""

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import bertsmith
from bertsmith.checkpoint.folder import Identity, load_moments, read_state
from bertsmith.checkpoint.manifest import MANIFEST
from bertsmith.checkpoint.state import RunState
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.parallel.choice import devices_here, processes_to_start
from bertsmith.parallel.kept_rows import TrainedRows
from bertsmith.parallel.place import place_from
from bertsmith.parallel.world import World, joined
from bertsmith.recipes.config import PretrainConfig, SelftestConfig, TrainingConfig
from bertsmith.recipes.resume import as_begun, checkpoint_to_resume, flat
from bertsmith.report.progress import Speaker
from bertsmith.report.run_folder import open_run_folder, versions, write_config
from bertsmith.report.run_lock import RunLock, hold_run_lock
from bertsmith.say import Say
from bertsmith.train.optim import AdamW


@contextmanager
def world_of(config: TrainingConfig) -> Iterator[World]:
    """Within the block this process is a rank of the run that the config describes.

    Raises:
        UserError: The config asks for more processes than were started, or ranks differ.
    """
    here = devices_here(config.device)
    if count := processes_to_start(config.parallel, here, os.environ):
        raise UserError(
            f"--parallel.devices {count} takes {count} processes, which the bertsmith command "
            f"starts; from Python, start this program with torchrun --nproc-per-node {count}"
        )
    on_gpus = here.kind == "cuda"
    with joined(config.parallel, on_gpus=on_gpus, facts=facts_to_share(config)) as world:
        yield world


def facts_to_share(config: TrainingConfig | SelftestConfig) -> dict[str, str]:
    """What every rank has to have alike: versions, our code, and each setting by its key."""
    settings = {key: str(value) for key, value in flat(dataclasses.asdict(config)).items()}
    return versions() | {"code": code_fingerprint()} | settings


@contextmanager
def sole_run(world: World, config: TrainingConfig) -> Iterator[RunLock | None]:
    """Within the block no other run writes into the output folder; rank 0 holds the lock.

    Raises:
        UserError: On every rank: another run holds it, or nothing can be written there.
    """
    with ExitStack() as stack:
        held: list[RunLock] = []

        def take() -> bool:
            say = Speaker().say
            held.append(stack.enter_context(hold_run_lock(Path(config.output), say)))
            return True

        world.on_main(take)
        yield held[0] if held else None


def agreed_config(world: World, config: PretrainConfig, say: Say) -> PretrainConfig:
    """The config, with the masking that rank 0 finds the run was begun with."""
    schedule = world.on_main(lambda: as_begun(config, say).masking.schedule)
    return replace(config, masking=replace(config.masking, schedule=schedule))


def agreed_checkpoint(
    world: World,
    config: TrainingConfig,
    identity: Identity,
    say: Say,
) -> tuple[Path | None, bool]:
    """The checkpoint that every rank goes on from, as rank 0 finds it; None to start anew.

    Returns:
        It, and whether the run goes on with other settings or data than it has.

    Raises:
        UserError: As `checkpoint_to_resume`.
    """

    def find() -> dict[str, Any] | None:
        if not config.resume:
            return None
        found = checkpoint_to_resume(Path(config.output), identity, config.resume_override, say)
        return None if found is None else dataclasses.asdict(found)

    found = world.on_main(find)
    return (None, False) if found is None else (Path(found["checkpoint"]), found["is_changed"])


def started(
    config: TrainingConfig,
    checkpoint: Path | None,
    optimizer: AdamW,
    *,
    rows: TrainedRows | None = None,
) -> RunState:
    """Where a run starts; a checkpoint's moments go into the optimizer.

    Args:
        config: Of the run.
        checkpoint: What it goes on from, if it does.
        optimizer: Of the run.
        rows: Those of the token table that it trains; None: all.
    """
    state = RunState()
    if checkpoint is not None:
        state = read_state(checkpoint)[0]
        load_moments(checkpoint, optimizer.named_moments(), rows=rows)
        optimizer.updates = state.updates
    if config.micro_batch != "auto":
        state = replace(state, micro_batch_tokens=config.micro_batch)
    return state


def check_same_start(world: World, model: nn.Module, checkpoint: Path | None) -> None:
    """Ranks that read their weights from disks of their own must have read the same.

    Args:
        world: The ranks.
        model: With its starting weights, not yet in shards.
        checkpoint: What the run goes on from, if it does.

    Raises:
        UserError: On every rank, naming the first that differs from rank 0.
    """
    if world.size == 1:
        return
    checksum = 0
    for parameter in model.parameters():
        checksum = zlib.crc32(parameter.detach().cpu().numpy().data, checksum)
    facts = {"checksum of the weights": f"{checksum:08x}"}
    if checkpoint is not None:
        facts["manifest of the checkpoint"] = _sha256(checkpoint / MANIFEST)
    world.check_same("starting weights", facts)


def _sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        return f"not readable ({error.strerror})"


def open_output(
    world: World,
    config: TrainingConfig,
    lines: Iterable[str],
    *,
    is_changed: bool,
) -> Speaker:
    """Make or empty the run folder and write its config; what speaks for this rank.

    Args:
        world: The ranks.
        config: Names the folder.
        lines: What was to be said before there was a log.
        is_changed: Whether the checkpoint has other settings. Until one has these, the config
            accepts the change by itself: killed in between, the run can still go on.

    Raises:
        UserError: On every rank, if rank 0 may not write there.
    """

    def make() -> str:
        folder = open_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
        write_config(folder, config, accepts_changes=is_changed)
        return str(folder)

    folder = world.on_main(make)
    speaker = Speaker(Path(folder)) if world.is_main else Speaker.silent()
    for line in lines:
        speaker.say(line)
    return speaker


def exit_code(config: TrainingConfig, status: str) -> int:
    """The exit code of a run that ended so; of one that is done the model's folder is printed.

    Args:
        config: Of the run.
        status: completed or interrupted.
    """
    if status == "interrupted":
        return EXIT_INTERRUPTED
    place = place_from(os.environ)
    if place is None or place.rank == 0:  # who speaks for the run, which has ended
        print(Path(config.output) / "model")
    return 0


def code_fingerprint() -> str:
    """sha256 over the package's own files."""
    digest = hashlib.sha256()
    root = Path(bertsmith.__file__).parent
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
