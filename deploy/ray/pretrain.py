"""Pretrain on a Ray cluster: one torchrun on each of so many nodes.

    ray job submit --working-dir . -- python deploy/ray/pretrain.py --nodes 2 --gpus-per-node 8

run.yaml, the prepared data and the run folder must be on a disk that all nodes share.
"""

import argparse
import subprocess

PORT = 29400


def torchrun_command(*, node: int, nodes: int, gpus_per_node: int, head_node: str) -> list[str]:
    """What runs on a node; the first holds the meeting point."""
    return [
        *("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(gpus_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head_node}:{PORT}"),
        *("--rdzv-id", "bertsmith"),
        *("--rdzv-conf", f"is_host={int(node == 0)},join_timeout=600"),
        *("-m", "bertsmith", "pretrain", "--config", "run.yaml", "--resume"),
    ]


def main() -> None:
    """Place a task on each node, start, and wait; a node that fails fails the job."""
    import ray  # noqa: PLC0415 - only where the job runs
    from ray.util.placement_group import placement_group  # noqa: PLC0415
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    args = parser.parse_args()
    ray.init()
    group = placement_group(
        [{"GPU": args.gpus_per_node, "CPU": 1}] * args.nodes, strategy="STRICT_SPREAD"
    )
    ray.get(group.ready())

    def on_node(number: int, function: object) -> object:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return ray.remote(num_gpus=args.gpus_per_node, scheduling_strategy=place)(function)

    head_node = ray.get(on_node(0, ray.util.get_node_ip_address).remote())  # type: ignore[attr-defined]
    runs = []
    for node in range(args.nodes):
        command = torchrun_command(
            node=node,
            nodes=args.nodes,
            gpus_per_node=args.gpus_per_node,
            head_node=head_node,
        )
        run = on_node(node, lambda command=command: subprocess.run(command, check=True).returncode)
        runs.append(run.remote())  # type: ignore[attr-defined]
    ray.get(runs)


if __name__ == "__main__":
    main()
