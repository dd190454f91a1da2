"""The job files parse and end in one torchrun command; the SLURM script does what it says."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from bertsmith import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(
    [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.py")],
)
OPTIONS = [
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
]


def command_in(file: Path) -> str:
    """The torchrun command of a file, on one line, without quotes and commas."""
    text = file.read_text().replace("\\\n", " ")
    if file.suffix == ".py":
        text = re.sub(r"[\"'(),*]", " ", text)
    found = [m.group(0) for m in re.finditer(r"torchrun\s+--nnodes.*?--resume", text, re.S)]
    assert len(found) == 1, f"{file.name} has {len(found)} torchrun commands"
    return " ".join(found[0].split())


def test_there_is_a_file_for_each_kind_of_cluster() -> None:
    assert {f.parent.name for f in FILES} == {"slurm", "kubernetes", "skypilot", "ray"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_file_ends_in_the_same_command(file: Path) -> None:
    command = command_in(file)
    torchrun, _, ours = command.partition("-m bertsmith ")
    assert re.findall(r"--[a-z-]+", torchrun) == OPTIONS
    assert "--rdzv-backend c10d" in torchrun
    assert "join_timeout=600" in torchrun
    assert "is_host=" in torchrun
    assert ours == "pretrain --config run.yaml --resume" or "CONFIG" in ours


def test_torchrun_and_bertsmith_know_these_options(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert set(OPTIONS) <= known
    config = tmp_path / "run.yaml"
    config.write_text("data: d\nmodel: bert-tiny\noutput: o\nsteps: 1\n")
    assert cli._parse("pretrain", ["--config", str(config), "--resume"]) is not None


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.yaml")), ids=lambda f: f.name)
def test_yaml_files_parse(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    assert all(isinstance(document, dict) for document in documents)
    if file.parent.name == "kubernetes":
        assert all({"apiVersion", "kind", "metadata", "spec"} <= d.keys() for d in documents)


def test_the_python_file_compiles_and_names_the_first_node_host() -> None:
    source = (DEPLOY / "ray" / "pretrain.py").read_text()
    ast.parse(source)
    space: dict[str, object] = {"__name__": "deploy"}
    exec(compile(source, "pretrain.py", "exec"), space)
    make = space["torchrun_command"]
    commands = [make(node=n, nodes=2, gpus_per_node=8, head_node="a") for n in (0, 1)]  # type: ignore[operator]
    assert ["is_host=1,join_timeout=600" in c for c in commands] == [True, False]
    assert ["is_host=0,join_timeout=600" in c for c in commands] == [False, True]


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" >> calls; fi',
    # srun runs the task as the node that SLURM_NODEID says
    "srun": 'shift; exec "$@"',
    "torchrun": 'echo "torchrun $@" >> calls; echo "$OMP_NUM_THREADS" > threads\n'
    'trap "echo saved >> calls; exit 1" TERM\n'
    "[ -e hold ] || exit 0\nfor _ in $(seq 300); do sleep 0.05; done",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with SLURM's programs and torchrun, as stand-ins."""
    for name, body in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    (tmp_path / "run.yaml").write_text("data: d\noutput: out\n")
    (tmp_path / "out").mkdir()
    return tmp_path


def start(folder: Path, *, node: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", str(DEPLOY / "slurm" / "pretrain.sbatch"), "run.yaml"],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "41234",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NODEID": str(node),
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "32",
            "OMP_NUM_THREADS": "",
        },
    )


def calls_of(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="SLURM runs on Linux")
@pytest.mark.parametrize("node", [0, 1])
def test_the_slurm_script_starts_torchrun_on_the_head_node(slurm: Path, node: int) -> None:
    with start(slurm, node=node) as job:
        assert job.wait(20) == 0
    (call,) = calls_of(slurm)
    assert "--nnodes 2 --nproc-per-node 4" in call
    assert f"--rdzv-endpoint node-a:{20000 + 41234 % 20000} --rdzv-id 41234" in call
    assert f"is_host={int(node == 0)}," in call
    assert call.endswith("-m bertsmith pretrain --config run.yaml --resume")
    assert (slurm / "threads").read_text().strip() == "8"  # 32 cores for 4 ranks


@pytest.mark.skipif(sys.platform != "linux", reason="SLURM runs on Linux")
@pytest.mark.parametrize(("status", "code"), [("interrupted", 0), ("failed", 1)])
def test_a_signal_lets_the_ranks_save_and_requeues_only_what_was_interrupted(
    slurm: Path, status: str, code: int
) -> None:
    (slurm / "hold").touch()
    with start(slurm) as job:
        until = time.monotonic() + 10
        while not calls_of(slurm) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)  # torchrun's stand-in sets its trap
        (slurm / "out" / "summary.json").write_text(f'{{\n  "status": "{status}"\n}}\n')
        job.send_signal(signal.SIGUSR1)
        assert job.wait(20) == code
    assert "saved" in calls_of(slurm)
    assert ("requeue 41234" in calls_of(slurm)) == (status == "interrupted")
