"""Pretrain on a Ray cluster: one torchrun on each of so many nodes.

    ray job submit --working-dir . -- python deploy/ray/pretrain.py --folder /shared/run --nodes 2

--folder holds run.yaml, and is on a disk that all nodes share; the paths in run.yaml begin there.
A run that was stopped and saved is started again, unless the job itself was told to stop.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

TORCHRUN = "deploy/torchrun.py"
FIRST_PORT, PORTS = 20_000, 10_000
SHUTDOWN_SECONDS = 100
"""How long torchrun lets its ranks save."""

OTHERS_SECONDS = 700
"""How long nodes may stay when one has failed; ranks miss it after parallel.timeout_seconds."""

MISTAKE, RESUMABLE = 2, 75


def torchrun_command(
    *, node: int, nodes: int, gpus_per_node: int, addresses: list[str], run_id: str
) -> list[str]:
    """What runs on a node; the first holds the meeting point."""
    port = FIRST_PORT + int(run_id, 16) % PORTS
    return [
        *("python", TORCHRUN, "--nnodes", str(nodes), "--nproc-per-node", str(gpus_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:{port}"),
        *("--rdzv-id", run_id),
        *("--rdzv-conf", f"is_host={int(node == 0)},join_timeout=600,read_timeout=600"),
        *("--local-addr", addresses[node]),
        *("-m", "bertsmith", "pretrain", "--config", "run.yaml", "--resume"),
    ]


class Node:
    """One node's torchrun; an actor, so that the driver can ask after it and stop it."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """This node's address within the cluster."""
        import ray  # noqa: PLC0415 - only where the job runs

        return str(ray.util.get_node_ip_address())

    def start(self, command: list[str], folder: str, threads: int) -> None:
        """Start the command in the folder; the script it names lies in the job's working folder."""
        python, script, *rest = command
        environment = os.environ | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        }
        # A group of its own: a Ctrl-C at Ray's terminal must not reach ranks twice.
        self.process = subprocess.Popen(
            [python, os.path.abspath(script), *rest],
            cwd=folder,
            env=environment,
            start_new_session=True,
        )

    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """Ask it to save and to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


class Stop:
    """Whether the driver has got a signal."""

    def __init__(self) -> None:
        """Listen to SIGTERM, which `ray job stop` sends, and to Ctrl-C."""
        self.is_requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True


def job_code(codes: list[int]) -> int:
    """One code for all nodes: a mistake before a fault before what can go on.

    A node whose peer has been stopped may fail over the lost connection, so one 75 is enough.
    """
    for code in (MISTAKE, RESUMABLE):
        if code in codes:
            return code
    return next((code if code > 0 else 1 for code in codes if code != 0), 0)


def wait_for(ray: Any, nodes: list[Any], stop: Stop, *, poll_seconds: float = 1.0) -> int:
    """Wait until every node has ended; a signal, or a node that has failed, stops them all.

    Args:
        ray: The module, or what stands in for it.
        nodes: Handles of `Node` actors.
        stop: Whether the driver was told to stop.
        poll_seconds: Time between two looks.
    """
    is_stopping = False
    failed_at = None
    while True:
        codes = ray.get([node.code.remote() for node in nodes])
        if None not in codes:
            return job_code(codes)
        if failed_at is None and any(code not in (None, 0) for code in codes):
            failed_at = time.monotonic()
        is_overdue = failed_at is not None and time.monotonic() - failed_at > OTHERS_SECONDS
        if not is_stopping and (stop.is_requested or is_overdue):
            is_stopping = True
            ray.get([node.stop.remote() for node in nodes])
        time.sleep(poll_seconds)


def run_once(ray: Any, options: argparse.Namespace, stop: Stop) -> int:
    """Place an actor on each node, start, and wait; a lost node is a fault."""
    from ray.util.placement_group import (  # noqa: PLC0415
        placement_group,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (  # noqa: PLC0415
        PlacementGroupSchedulingStrategy,
    )

    processes = max(options.gpus_per_node, 1)
    needs = {"CPU": options.cpus_per_node, "GPU": options.gpus_per_node}
    bundle = {name: count for name, count in needs.items() if count}
    group = placement_group([bundle] * options.nodes, strategy=options.placement)
    try:
        while not ray.wait([group.ready()], timeout=1.0)[0]:
            if stop.is_requested:
                return RESUMABLE
        nodes = [
            ray.remote(Node)
            .options(
                num_cpus=options.cpus_per_node,
                num_gpus=options.gpus_per_node,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            )
            .remote()
            for number in range(options.nodes)
        ]
        addresses = ray.get([node.address.remote() for node in nodes])
        run_id = os.urandom(8).hex()
        threads = max(options.cpus_per_node // processes, 1)
        commands = [
            torchrun_command(
                node=number,
                nodes=options.nodes,
                gpus_per_node=processes,
                addresses=addresses,
                run_id=run_id,
            )
            for number in range(options.nodes)
        ]
        ray.get(
            [
                node.start.remote(command, options.folder, threads)
                for node, command in zip(nodes, commands, strict=True)
            ]
        )
        return wait_for(ray, nodes, stop)
    except ray.exceptions.RayError as error:
        print(f"a node was lost: {error}", file=sys.stderr)
        return 1
    finally:
        remove_placement_group(group)


def main() -> int:
    """Run until it ends well, cannot, or was told to stop; a start goes on from the last save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--cpus-per-node", type=int, default=64)
    parser.add_argument("--placement", default="STRICT_SPREAD", help="Ray's placement strategy")
    parser.add_argument("--restarts", type=int, default=20)
    options = parser.parse_args()

    import ray  # noqa: PLC0415 - so that this file can be read without Ray

    ray.init()
    stop = Stop()  # after init, which sets its own handler
    for _ in range(options.restarts + 1):
        code = run_once(ray, options, stop)
        if stop.is_requested or code in (0, MISTAKE):
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
