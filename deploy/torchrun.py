"""torchrun whose exit code is that of its ranks; torchrun's own is 1 whatever they ended with.

    python deploy/torchrun.py --nnodes ... -m bertsmith pretrain --config run.yaml --resume

Clusters restart a job by its exit code: 75 says that the run was stopped and saved, 2 that the user
has to mend something.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

RESUMABLE, FAULT = 75, 1


def code_of(codes: list[int]) -> int:
    """One code for the ranks of a machine.

    When a rank ends torchrun sends SIGTERM to the others, and they may save and end with 75 or die
    of it. So 75 counts only if no rank ended in another way.
    """
    others = [code for code in codes if code not in (RESUMABLE, -signal.SIGTERM)]
    if RESUMABLE in codes and not others:
        return RESUMABLE
    return next((code for code in others if code > 0), FAULT)


def run(arguments: list[str]) -> int:
    """Run torchrun.

    Args:
        arguments: What torchrun is given.

    Returns:
        0; the code of the ranks, as in `code_of`; or 75 if this process was told to stop, since
        torchrun then has passed that on to its ranks and has waited for them.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        return code_of([failure.exitcode for failure in error.failures.values()])
    except SignalException:
        return RESUMABLE
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
