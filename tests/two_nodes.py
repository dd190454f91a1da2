"""Two machines on one: network namespaces joined by a virtual cable, and torchrun on each.

A namespace has its own interfaces, addresses and ports, so processes in two of them reach each
other over the cable alone. What this cannot show: another machine's disk and clock, which are
shared.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND_SECONDS = 20.0
"""How long `ip` may take; it takes milliseconds."""

RENDEZVOUS_PORT = 29400

_numbers = itertools.count()


def why_not() -> str | None:
    """Why no two nodes can be made here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip (Debian's package iproute2)"
    name = f"bertsmith-probe-{os.getpid()}"
    probe = _ip("netns", "add", name, check=False)
    if probe.returncode:
        return f"ip netns add: {probe.stderr.strip()}"
    _ip("netns", "del", name, check=False)
    return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A torchrun launcher on a node."""

    process: subprocess.Popen[bytes]
    log: Path
    """What it and its ranks wrote."""

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it still runs when the time is over."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Node:
    """One of the two."""

    def __init__(self, number: int, namespace: str, interface: str, address: str) -> None:
        """Nothing is made yet."""
        self.number, self.namespace = number, namespace
        self.interface, self.address = interface, address
        self.jobs: list[Job] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Job:
        """Start a program on this node, in a process group of its own."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self.jobs.append(Job(process=process, log=log))
        return self.jobs[-1]

    def pids(self) -> list[int]:
        """Every process that runs on the node, orphans too."""
        listed = _ip("netns", "pids", self.namespace, check=False)
        return [pid for pid in map(int, listed.stdout.split()) if _runs(pid)]

    def link(self, state: str) -> None:
        """Put the cable's end `up`, or `down`."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)

    def kill(self) -> None:
        """Kill every process at once, the launcher first or last as it comes: power is off."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} of {self.namespace} do not die")
            time.sleep(0.05)


class TwoNodes:
    """Two nodes with a cable between them; use as a context, so that nothing is left behind."""

    def __init__(self) -> None:
        """Names that no other test run has, of at most 15 characters as Linux allows."""
        tag = f"{os.getpid()}{next(_numbers)}"
        self.nodes = tuple(
            Node(number, f"bs{tag}{letter}", f"v{tag}{letter}", f"10.77.0.{number + 1}")
            for number, letter in enumerate("ab")
        )

    def __enter__(self) -> "TwoNodes":
        """Make the namespaces and the cable."""
        try:
            first, second = self.nodes
            for node in self.nodes:
                _ip("netns", "add", node.namespace)
            _ip(
                *("link", "add", first.interface, "netns", first.namespace, "type", "veth"),
                *("peer", "name", second.interface, "netns", second.namespace),
            )
            for node in self.nodes:
                into = ("-n", node.namespace)
                _ip(*into, "addr", "add", f"{node.address}/24", "dev", node.interface)
                _ip(*into, "link", "set", "lo", "up")
                node.link("up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what runs and remove everything."""
        self.close()

    def close(self) -> None:
        """Kill what runs and remove everything; a part that is not there is no fault."""
        for node in self.nodes:
            try:
                node.kill()
            finally:
                # The cable goes with its namespace; processes are dead, so the namespace goes too.
                _ip("netns", "del", node.namespace, check=False)
        for node in self.nodes:
            for job in node.jobs:
                job.process.wait(COMMAND_SECONDS)

    def torchrun(
        self,
        number: int,
        program: Sequence[str],
        *,
        log: Path,
        nodes: str = "2",
        max_restarts: int = 0,
        rendezvous: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Start torchrun's launcher on a node, with one rank.

        Args:
            number: Of the node; node 0 holds the rendezvous.
            program: What follows torchrun's own options: `-m bertsmith pretrain ...` or a script.
            log: File for what launcher and rank write.
            nodes: `2`, or `1:2` for a job that may shrink.
            max_restarts: How often the ranks may be started anew.
            rendezvous: More of `--rdzv-conf`.
            env: More of the environment.
        """
        node = self.nodes[number]
        # is_host is said, since torchrun finds no name for an address of a namespace and would
        # take both sides for clients.
        conf = {"is_host": int(number == 0), **(rendezvous or {})}
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-id", node.namespace[:-1]),
            *("--rdzv-endpoint", f"{self.nodes[0].address}:{RENDEZVOUS_PORT}"),
            *("--rdzv-conf", ",".join(f"{k}={v}" for k, v in conf.items())),
            *("--local-addr", node.address),
            *program,
        ]
        own = {"GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1"}
        return node.start(argv, os.environ | own | dict(env or {}), log)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: It has not come; `what` says what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process has not ended yet; one that waits to be reaped has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _ip(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["ip", *argv], capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
    )
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
    return done
