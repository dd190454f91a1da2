"""Two machines, really: network namespaces with a cable between them, and torchrun on each."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from two_nodes import Job, TwoNodes, wait_until, why_not

Run = Callable[..., subprocess.CompletedProcess[str]]

START_SECONDS = 60.0
TIMEOUT_SECONDS = 8.0
"""--parallel.timeout_seconds of the runs that are cut off."""

ENDS_SECONDS = TIMEOUT_SECONDS + 40.0
"""In which ranks and launchers end that the network has left alone, as docs/parallel.md states."""

RANK_ENDS_SECONDS = 10.0
"""In which a process that has begun to end is gone, on a busy machine."""

pytestmark = [
    pytest.mark.two_nodes,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as made:
        yield made


def words(root: Path, output: Path, *, steps: int) -> list[str]:
    return [
        *("pretrain", "--data", str(root / "prepared"), "--model", str(root / "shape.json")),
        *("--output", str(output), "--steps", str(steps), "--tokens_per_step", "1024"),
        *("--packing.tokens_per_pack", "512", "--packing.max_sequence_tokens", "64"),
        *("--precision", "fp32", "--device", "cpu", "--log_every_steps", "1"),
        *("--save.every_steps", "50", "--eval.every_steps", "1000", "--resume"),
        *("--parallel.timeout_seconds", str(TIMEOUT_SECONDS)),
    ]


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def start_both(
    nodes: TwoNodes, argv: list[str], folder: Path, *, min_to_max: str = "2", restarts: int = 0
) -> tuple[Job, Job]:
    first, second = (
        nodes.torchrun(
            number,
            ["-m", "bertsmith", *argv],
            log=folder / f"node-{number}.log",
            nodes=min_to_max,
            max_restarts=restarts,
        )
        for number in (0, 1)
    )
    return first, second


def logs(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("node-*.log")))


def test_two_nodes_give_what_one_process_gives(
    nodes: TwoNodes, prepared: Path, bertsmith: Run, tmp_path: Path
) -> None:
    jobs = start_both(nodes, words(prepared, tmp_path / "run", steps=20), tmp_path)
    assert [job.wait(START_SECONDS + 60.0) for job in jobs] == [0, 0], logs(tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 2
    assert bertsmith(*words(prepared, tmp_path / "alone", steps=20)).returncode == 0
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "alone")


def test_the_survivor_of_a_killed_node_finishes_the_run(
    nodes: TwoNodes, prepared: Path, bertsmith: Run, tmp_path: Path
) -> None:
    argv = words(prepared, tmp_path / "run", steps=400)
    survivor, _ = start_both(nodes, argv, tmp_path, min_to_max="1:2", restarts=3)
    wait_until(lambda: steps_of(tmp_path / "run") >= 120, START_SECONDS, "step 120")
    nodes.nodes[1].kill()
    assert survivor.wait(150.0) == 0, logs(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["ranks"]) == ("completed", 400, 1)
    assert bertsmith(*words(prepared, tmp_path / "alone", steps=400)).returncode == 0
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "alone")


def test_both_sides_of_a_cut_cable_end(nodes: TwoNodes, prepared: Path, tmp_path: Path) -> None:
    argv = words(prepared, tmp_path / "run", steps=100_000)
    jobs = start_both(nodes, argv, tmp_path)
    wait_until(lambda: steps_of(tmp_path / "run") >= 20, START_SECONDS, "step 20")
    nodes.nodes[1].link("down")
    until = time.monotonic() + ENDS_SECONDS
    codes = [job.wait(until - time.monotonic()) for job in jobs]
    # Node 0's launcher sees its rank fail. Node 1's hangs in a question to node 0, and is killed.
    assert codes == [1, -signal.SIGKILL], f"{codes}\n{logs(tmp_path)}"
    # The rank that killed its launcher ends just after it.
    wait_until(
        lambda: not any(node.pids() for node in nodes.nodes),
        max(until - time.monotonic(), RANK_ENDS_SECONDS),
        "the end of every process of both nodes",
    )
    assert "stopped answering" in (tmp_path / "node-0.log").read_text()
    assert "rank 1 is cut off" in (tmp_path / "node-1.log").read_text()
    assert not (tmp_path / "run" / "model").exists()
