"""Start a process for each device of this machine, through torchrun's elastic agent.

The command is the one the user gave; in each process the environment says which rank it is.
"""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bertsmith.errors import EXIT_FAULT, EXIT_INTERRUPTED


def launch(arguments: Sequence[str], *, processes: int) -> int:
    """Run `bertsmith ARGUMENTS` as so many ranks; the exit code they agreed on.

    Args:
        arguments: The command line, verb first.
        processes: Ranks; without OMP_NUM_THREADS each gets its part of the CPU cores.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // processes, 1)))
    # The agent would report each exit code in a box of its own; our ranks say what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
    )
    try:
        elastic_launch(config, sys.executable)("-m", "bertsmith", *arguments)
    except ChildFailedError as error:
        return _agreed_code([f.exitcode for f in error.failures.values()])
    except SignalException:
        return EXIT_INTERRUPTED
    return 0


def _agreed_code(codes: Sequence[int]) -> int:
    """The exit code of a rank that ended by itself; negative ones were killed by the agent."""
    return next((code for code in codes if code > 0), EXIT_FAULT)
