"""The end of a rank, and of torchrun's launcher, on a machine that the network has left.

A launcher that does not hold the meeting point asks it ten times a second whether nodes wait. Where
the network goes in such a question, torch's TCPStore client times out, sends a word of that, and
waits for the reply without a limit (torch 2.13: still after 240 s; the kernel's TCP gives up after
about 15 minutes). Its Python thread is inside that call, so no signal but SIGKILL ends it, and only
its rank, whose own waits have limits, knows. No torch here.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from bertsmith.parallel.place import Place

CONNECT_SECONDS = 2.0
"""For one try to reach the meeting point; far more than a round trip in a cluster."""

PATIENCE_SECONDS = 5.0
"""For all tries, after which the network counts as gone."""

Connect = Callable[[str, int, float], None]
"""Opens and closes a connection to (host, port) within so many seconds, or raises OSError."""


def end_for_lack_of_answer(place: Place, doing: str) -> None:
    """End the process where nobody can be asked any more, and its launcher if that hangs too."""
    print(
        f"bertsmith: error: rank {place.rank} is cut off at {doing}: neither the other ranks nor "
        "the meeting point answer; is the network down?",
        file=sys.stderr,
        flush=True,
    )
    if place.has_agent:
        end_cut_off_launcher(place.host, place.port)
    os._exit(1)


def end_cut_off_launcher(host: str, port: int, *, connect: Connect | None = None) -> bool:
    """Kill this process's parent if the meeting point cannot be reached.

    A launcher that reaches it is left alone: it ends by itself, or starts ranks anew on the
    machines that are left.

    Args:
        host: Of the meeting point, which torchrun's agent serves.
        port: Of the meeting point.
        connect: Another way to try, for tests.

    Returns:
        Whether the launcher was killed.
    """
    launcher = os.getppid()
    if _answers(host, port, connect or _connect):
        return False
    if launcher == 1 or os.getppid() != launcher:
        # Process 1 of a container cannot be killed from inside; and who has no parent any more
        # must not kill who adopted it.
        return False
    os.kill(launcher, signal.SIGKILL)
    return True


def _answers(host: str, port: int, connect: Connect) -> bool:
    """Whether the machine answers within `PATIENCE_SECONDS`; a refusal is an answer."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            connect(host, port, CONNECT_SECONDS)
        except ConnectionRefusedError:
            return True  # nobody listens any more, so the launcher's connection has ended as well
        except OSError:  # no route, no name, or no answer in time
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        else:
            return True


def _connect(host: str, port: int, seconds: float) -> None:
    socket.create_connection((host, port), timeout=seconds).close()
