"""What pretrain and finetune share about running as one rank of several."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import bertsmith
from bertsmith.errors import UserError
from bertsmith.parallel.choice import devices_here, processes_to_start
from bertsmith.parallel.place import place_from
from bertsmith.parallel.world import World, joined
from bertsmith.recipes.config import FinetuneConfig, PretrainConfig
from bertsmith.recipes.resume import checkpoint_to_resume, flat
from bertsmith.report.progress import Speaker
from bertsmith.report.run_folder import open_run_folder, versions, write_config


@contextmanager
def world_of(config: PretrainConfig | FinetuneConfig) -> Iterator[World]:
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
    facts = versions() | {"code": code_fingerprint()}
    facts |= {key: str(value) for key, value in flat(dataclasses.asdict(config)).items()}
    with joined(config.parallel, on_gpus=here.kind == "cuda", facts=facts) as world:
        yield world


def agreed_checkpoint(
    world: World,
    config: PretrainConfig | FinetuneConfig,
    data_fingerprint: str,
    say: Callable[[str], None],
) -> Path | None:
    """The checkpoint that every rank goes on from, as rank 0 finds it; None to start anew.

    Raises:
        UserError: As `checkpoint_to_resume`.
    """

    def find() -> str | None:
        path = checkpoint_to_resume(Path(config.output), config, data_fingerprint, say)
        return None if path is None else str(path)

    found = world.on_main(find)
    return None if found is None else Path(found)


def open_output(world: World, config: PretrainConfig | FinetuneConfig) -> Speaker:
    """Make or empty the run folder and write its config; what speaks for this rank.

    Raises:
        UserError: On every rank, if rank 0 may not write there.
    """

    def make() -> str:
        folder = open_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
        write_config(folder, config)
        return str(folder)

    folder = world.on_main(make)
    return Speaker(Path(folder)) if world.is_main else Speaker.silent()


def is_main_process() -> bool:
    """Whether this process speaks for the run; asked before it has joined and after it has left."""
    place = place_from(os.environ)
    return place is None or place.rank == 0


def code_fingerprint() -> str:
    """sha256 over the package's own files."""
    digest = hashlib.sha256()
    root = Path(bertsmith.__file__).parent
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
