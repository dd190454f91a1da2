"""Start a process for each device of this machine, through torchrun's elastic agent.

The command is the one the user gave; in each process the environment says which rank it is.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bertsmith.errors import EXIT_FAULT, EXIT_INTERRUPTED
from bertsmith.parallel import last_word
from bertsmith.parallel.heart import SAVE_SECONDS
from bertsmith.parallel.last_word import LastWord

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Those that go on to the ranks. torchrun's own set lacks the last, SLURM's usual warning."""


def launch(arguments: Sequence[str], *, processes: int) -> int:
    """Run `bertsmith ARGUMENTS` as so many ranks; the exit code they agreed on.

    Ranks that ask for it are started again with more options: under fsdp a step that does not fit
    cannot be done over, but a run can go on from its last checkpoint.

    Args:
        arguments: The command line, verb first.
        processes: Ranks; without OMP_NUM_THREADS each gets its part of the CPU cores.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // processes, 1)))
    # The agent would report each exit code in a box of its own; our ranks say what is wrong. Each
    # of its modules sets a level of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    more: list[str] | None = []
    while more is not None:
        arguments = [*arguments, *more]
        code, line, more = _launch_once(arguments, processes=processes)
        if line is not None:
            print(line, file=sys.stderr)
        if more is not None:
            print(f"bertsmith: started again with {' '.join(more)}", file=sys.stderr)
    return code


def _launch_once(
    arguments: Sequence[str], *, processes: int
) -> tuple[int, str | None, list[str] | None]:
    """The exit code, what is left to say, and options to start again with, if asked for."""
    with TemporaryDirectory(prefix="bertsmith-", ignore_cleanup_errors=True) as folder:
        os.environ[last_word.FOLDER] = folder
        try:
            failures, signal_number = _run(arguments, processes=processes)
        finally:
            del os.environ[last_word.FOLDER]
        words, again = last_word.read(Path(folder)), last_word.asked_again(Path(folder))
    if signal_number is not None:
        return *end_by_signal(signal_number, words, processes=processes), None
    code, line = end_of_ranks(failures, words)
    return code, line, again if code else None


def _run(arguments: Sequence[str], *, processes: int) -> tuple[dict[int, int], int | None]:
    """Exit codes of the ranks that failed, first failure first, and the signal that came to us."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
        **_known({"shutdown_timeout": SAVE_SECONDS, "signals_to_handle": SIGNALS}),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "bertsmith", *arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}, None
    except SignalException as error:
        return {}, error.sigval
    return {}, None


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of some options that this version of torch has."""
    names = {field.name for field in fields(LaunchConfig)}
    return {name: value for name, value in options.items() if name in names}


def end_of_ranks(
    failures: Mapping[int, int], words: Mapping[int, LastWord]
) -> tuple[int, str | None]:
    """The exit code of a run that nobody stopped, and what is left to say.

    Args:
        failures: Exit codes of ranks, first failure first; negative ones are signals, of which all
            but the first may be the agent's.
        words: What ranks have left.
    """
    lines = [word.line for word in words.values() if word.line is not None]
    codes = [word.code for word in words.values() if word.code]
    codes += [code for code in failures.values() if code > 0]
    rank, code = next(iter(failures.items()), (0, 0))
    # A rank that ends by itself says why, or knows that another does. If the first was killed, the
    # agent has interrupted the others.
    told = [code for code in codes if code != EXIT_INTERRUPTED] if code < 0 else codes
    if told:
        return told[0], lines[0] if lines else None
    if not code:
        return 0, None
    name = _name_of(-code)
    why = " (out of memory?)" if name == "SIGKILL" else ""
    return EXIT_FAULT, f"bertsmith: error: rank {rank} was ended by {name}{why}"


def end_by_signal(
    number: int, words: Mapping[int, LastWord], *, processes: int
) -> tuple[int, str | None]:
    """The exit code of a run that a signal to its launcher ended, and what is left to say.

    Args:
        number: Of the signal.
        words: What ranks have left.
        processes: Ranks.
    """
    codes = [word.code for word in words.values()]
    if other := [code for code in codes if code not in (0, EXIT_INTERRUPTED)]:
        lines = [word.line for word in words.values() if word.line is not None]
        return other[0], lines[0] if lines else None
    if len(codes) == processes:
        return max(codes), next((word.line for word in words.values() if word.line), None)
    return 128 + number, f"bertsmith: ended by {_name_of(number)} before all ranks had saved"


def _name_of(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
