"""The job files end in one torchrun command; their scripts do what they say when they are run."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from bertsmith import cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="clusters run Linux")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm" / "pretrain.sbatch"
TORCHRUN = DEPLOY / "torchrun.py"
SHUTDOWN_SECONDS = 100
OPTIONS = [
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--local-addr",
]


def documents_of(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def wait_until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def check_command(words: list[str]) -> dict[str, str]:
    """Options of a command `torchrun ...` or `python .../torchrun.py ...` of the common shape."""
    start = next(
        i for i, word in enumerate(words) if Path(word).name in ("torchrun", TORCHRUN.name)
    )
    split = words.index("-m")
    options = words[start + 1 : split]
    assert options[::2] == OPTIONS
    assert words[split:] == ["-m", "bertsmith", "pretrain", "--config", "run.yaml", "--resume"]
    return dict(zip(options[::2], options[1::2], strict=True))


def test_torchrun_and_bertsmith_know_these_options(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert set(OPTIONS) <= known
    config = tmp_path / "run.yaml"
    config.write_text("data: d\nmodel: bert-tiny\noutput: o\nsteps: 1\n")
    assert cli._parse("pretrain", ["--config", str(config), "--resume"]) is not None


# torchrun.py: the exit code


RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), open(f"saved{rank}", "w"), sys.exit(75)))
open(f"ready{rank}", "w")
while not os.path.exists(f"ready{1 - rank}"):
    time.sleep(0.01)
code = os.environ["CODES"].split(",")[rank]
if code == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if code == "hold":
    while True:
        time.sleep(0.05)
sys.exit(int(code))
"""


def start_torchrun(folder: Path, codes: str) -> subprocess.Popen[bytes]:
    (folder / "rank.py").write_text(RANK)
    arguments = "--nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    return subprocess.Popen(
        [sys.executable, str(TORCHRUN), *arguments.split(), "rank.py"],
        cwd=folder,
        env=os.environ | {"CODES": codes, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("0,0", 0), ("75,75", 75), ("hold,2", 2), ("1,1", 1), ("hold,killed", 1)],
)
def test_torchrun_py_ends_with_the_code_of_its_ranks(
    tmp_path: Path, codes: str, expected: int
) -> None:
    with start_torchrun(tmp_path, codes) as process:
        assert process.wait(60) == expected


def test_torchrun_py_lets_ranks_save_after_a_signal_and_says_resumable(tmp_path: Path) -> None:
    with start_torchrun(tmp_path, "hold,hold") as process:
        wait_until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
        process.terminate()
        assert process.wait(60) == 75
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


# SLURM, with stand-ins for its programs


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$*" >> calls; fi',
    "scancel": 'echo "scancel $*" >> calls; kill -TERM "$(cat torchrun.pid)"',
    # srun would end the step at once if it got TERM itself
    "srun": """
trap 'echo "srun was killed" >> calls; kill -KILL "$(cat torchrun.pid)"; exit 143' TERM
echo "${SRUN_CPUS_PER_TASK:-unset}" > cpus
while [[ $1 == --* ]]; do echo "$1" >> srun_options; shift; done
"$@" & child=$!; wait "$child"
""",
    "torchrun": """
echo "torchrun $*" >> calls
echo "${OMP_NUM_THREADS:-unset} $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > environment
save() {
  sleep 0.5
  [ "$ON_SIGNAL" = nothing ] && exit 1
  printf '{"status": "%s", "written_at": "today"}' "$ON_SIGNAL" > out/run_status.json
  echo saved >> calls
  exit 1
}
trap save TERM
echo $$ > torchrun.pid
[ "$CODE" = hold ] || exit "$CODE"
for _ in $(seq 400); do sleep 0.05; done
""",
}
STALE = '{"status": "resumable", "written_at": "yesterday"}\n'


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with SLURM's programs and torchrun, as stand-ins."""
    for name, body in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    (tmp_path / "run.yaml").write_text('data: d\noutput: "out"  # the run folder\n')
    (tmp_path / "out").mkdir()
    return tmp_path


def start_job(
    folder: Path, *, node: int = 0, code: str = "hold", on_signal: str = "resumable", cpus: int = 32
) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"node-{'ab'[node]}",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": str(cpus),
        "CODE": code,
        "ON_SIGNAL": on_signal,
    }
    environment.pop("OMP_NUM_THREADS", None)
    if not cpus:
        del environment["SLURM_CPUS_PER_TASK"]
    return subprocess.Popen(
        ["bash", str(SBATCH), "run.yaml"],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def calls_of(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def signal_job(folder: Path, job: subprocess.Popen[str], *signals: signal.Signals) -> int:
    """Send a batch script what SLURM sends it; TERM goes to the step as well, as in scancel."""
    wait_until((folder / "torchrun.pid").exists)
    for number in signals:
        job.send_signal(number)
        if number == signal.SIGTERM:
            os.kill(int((folder / "torchrun.pid").read_text()), signal.SIGTERM)
        time.sleep(0.1)
    return job.wait(30)


@pytest.mark.parametrize("node", [0, 1])
def test_slurm_starts_torchrun_with_the_meeting_point_on_the_head_node(
    slurm: Path, node: int
) -> None:
    with start_job(slurm, node=node, code="0") as job:
        assert job.wait(30) == 0
    (call,) = calls_of(slurm)
    assert check_command(call.split()) == {
        "--nnodes": "2",
        "--nproc-per-node": "4",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node-a:21234",  # 20000 + 41234 % 10000
        "--rdzv-id": "41234-0",
        "--rdzv-conf": f"is_host={int(node == 0)},join_timeout=600,read_timeout=600",
        "--local-addr": f"node-{'ab'[node]}",
    }
    assert (slurm / "environment").read_text() == f"8 {SHUTDOWN_SECONDS}\n"  # 32 cores, 4 ranks
    assert (slurm / "cpus").read_text() == "32\n"
    assert "--kill-on-bad-exit=0" in (slurm / "srun_options").read_text()


def test_slurm_runs_without_cpus_per_task(slurm: Path) -> None:
    with start_job(slurm, code="0", cpus=0) as job:
        assert job.wait(30) == 0
    assert (slurm / "environment").read_text() == f"unset {SHUTDOWN_SECONDS}\n"
    assert (slurm / "cpus").read_text() == "unset\n"


def test_slurm_needs_to_know_the_run_folder(slurm: Path) -> None:
    (slurm / "run.yaml").write_text("data: d\nsave:\n  output: no\n")
    with start_job(slurm) as job:
        assert job.wait(30) == 2
        assert job.stderr is not None
        assert job.stderr.read().startswith("run.yaml has no line `output: FOLDER`")
    assert calls_of(slurm) == []


def test_slurm_requeues_after_the_save_when_time_is_nearly_over(slurm: Path) -> None:
    (slurm / "out" / "run_status.json").write_text(STALE)
    with start_job(slurm) as job:
        assert signal_job(slurm, job, signal.SIGUSR1) == 75
    assert calls_of(slurm)[1:] == ["scancel --signal=TERM 41234.0", "saved", "requeue 41234"]


@pytest.mark.parametrize("on_signal", ["nothing", "failed", "completed", "running"])
def test_slurm_does_not_requeue_what_this_start_has_not_saved(slurm: Path, on_signal: str) -> None:
    (slurm / "out" / "run_status.json").write_text(STALE)
    with start_job(slurm, on_signal=on_signal) as job:
        assert signal_job(slurm, job, signal.SIGUSR1) == 1
    assert "requeue 41234" not in calls_of(slurm)


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]], ids=["TERM", "USR1, TERM"]
)
def test_slurm_saves_but_does_not_requeue_what_a_user_cancels(
    slurm: Path, signals: list[signal.Signals]
) -> None:
    with start_job(slurm) as job:
        assert signal_job(slurm, job, *signals) == 75
    assert "saved" in calls_of(slurm)
    assert "requeue 41234" not in calls_of(slurm)


@pytest.mark.parametrize("code", [1, 2])
def test_slurm_does_not_requeue_a_failure(slurm: Path, code: int) -> None:
    (slurm / "out" / "run_status.json").write_text(STALE)
    with start_job(slurm, code=str(code)) as job:
        assert job.wait(30) == code
    assert len(calls_of(slurm)) == 1


def test_slurm_does_not_requeue_a_rank_that_somebody_stopped(slurm: Path) -> None:
    with start_job(slurm) as job:
        wait_until((slurm / "torchrun.pid").exists)
        os.kill(int((slurm / "torchrun.pid").read_text()), signal.SIGTERM)
        assert job.wait(30) == 75
    assert calls_of(slurm)[1:] == ["saved"]


def test_slurm_gives_torchrun_time_to_save() -> None:
    settings = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SBATCH.read_text(), re.M))
    target, seconds = settings["signal"].split("@")
    assert target == "B:USR1"
    assert int(seconds) > SHUTDOWN_SECONDS
    assert settings["open-mode"] == "append"
    assert "requeue" in settings


# Kubernetes and SkyPilot: their scripts, with a stand-in for python


def run_script(folder: Path, script: str, environment: dict[str, str]) -> dict[str, str]:
    """Options of the torchrun command that a file's script ends in."""
    for name in ("python", "nproc"):
        stub = folder / name
        stub.write_text(
            "#!/bin/bash\necho 64\n"
            if name == "nproc"
            else '#!/bin/bash\nprintf "%s\\n" "$@" > words\necho "$OMP_NUM_THREADS" > threads\n'
        )
        stub.chmod(0o755)
    subprocess.run(
        ["bash", "-c", script.replace("cd /work", f"cd {folder}")],
        cwd=folder,
        check=True,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/home/me", **environment},
    )
    words = (folder / "words").read_text().splitlines()
    assert words[0].endswith("/deploy/torchrun.py")
    return check_command(words)


def rendezvous(node: int) -> dict[str, str]:
    conf = f"is_host={int(node == 0)},join_timeout=600,read_timeout=600"
    return {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-id": "bertsmith",
        "--rdzv-conf": conf,
    }


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables that a file gives a value."""
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


@pytest.mark.parametrize("node", [0, 1])
def test_the_indexed_job_meets_at_its_first_pod(tmp_path: Path, node: int) -> None:
    service, job = documents_of("kubernetes/indexed-job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    script = container["args"][0]
    given = {"JOB_COMPLETION_INDEX": str(node), "POD_IP": "10.0.0.7"}
    assert run_script(tmp_path, script, given) == rendezvous(node) | {
        # pod 0 of an indexed job has the host name JOB-0, in the domain of its subdomain's service
        "--rdzv-endpoint": f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400",
        "--local-addr": "10.0.0.7",
    }


def test_the_indexed_job_restarts_what_was_saved_and_fails_a_mistake() -> None:
    service, job = documents_of("kubernetes/indexed-job.yaml")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert template["spec"]["restartPolicy"] == "Never"  # the API server refuses a policy otherwise
    (container,) = template["spec"]["containers"]
    actions: dict[int, str] = {}
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        for code in rule.get("onExitCodes", {"values": []})["values"]:
            assert rule["onExitCodes"]["operator"] == "In"
            assert rule["onExitCodes"]["containerName"] == container["name"]
            actions.setdefault(code, rule["action"])
    assert actions == {2: "FailJob", 75: "Ignore"}
    check_pod(template["spec"], environment_of(container))


def check_pod(pod: dict[str, Any], environment: dict[str, str]) -> None:
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == SHUTDOWN_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= 150
    assert pod["securityContext"]["fsGroup"] == 1000


@pytest.mark.parametrize("node", [0, 1])
def test_the_trainjob_takes_its_place_from_the_runtime(tmp_path: Path, node: int) -> None:
    _, job = documents_of("kubernetes/trainjob.yaml")
    trainer = job["spec"]["trainer"]
    assert "numProcPerNode" not in trainer
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "bertsmith-node-0-0.bertsmith",
        "PET_MASTER_PORT": "29500",
        "POD_IP": "10.0.0.7",
    }
    assert run_script(tmp_path, trainer["args"][0], given) == rendezvous(node) | {
        "--rdzv-endpoint": "bertsmith-node-0-0.bertsmith:29500",
        "--local-addr": "10.0.0.7",
    }


def test_the_trainjob_is_of_trainer_2_2() -> None:
    runtime, job = documents_of("kubernetes/trainjob.yaml")
    assert {d["apiVersion"] for d in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert set(job["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    spec = runtime["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")  # names that Trainer looks for
    check_pod(pod, environment_of(job["spec"]["trainer"]))
    assert pod["restartPolicy"] == "Never"
    # Exit code 2 fails the Job, and what the policy fails, fails the set; all else restarts it.
    (rule,) = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (patch,) = job["spec"]["runtimePatches"]
    assert patch["manager"]
    (patched,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert patched["name"] == node["name"]
    pod_patch = patched["template"]["spec"]["template"]["spec"]
    # PodSpecPatch knows neither a grace period nor a restart policy, ContainerPatch no image.
    assert set(pod_patch) == {"containers", "volumes"}
    (container_patch,) = pod_patch["containers"]
    assert set(container_patch) == {"name", "volumeMounts"}
    mounted = {mount["name"] for mount in container_patch["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod_patch["volumes"]}


@pytest.mark.parametrize("node", [0, 1])
def test_skypilot_meets_at_its_first_node(tmp_path: Path, node: int) -> None:
    (task,) = documents_of("skypilot/pretrain.yaml")
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    assert run_script(tmp_path, task["run"], given) == rendezvous(node) | {
        "--rdzv-endpoint": "10.0.0.1:29400",
        "--local-addr": f"10.0.0.{node + 1}",
    }
    assert (tmp_path / "threads").read_text() == "8\n"


def test_skypilot_restarts_what_was_saved_on_storage_that_can_rename() -> None:
    (task,) = documents_of("skypilot/pretrain.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (mount,) = task["file_mounts"].values()
    assert mount["mode"] == "MOUNT_CACHED"
    assert int(task["envs"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == SHUTDOWN_SECONDS


def test_shell_is_clean_for_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    _, indexed = documents_of("kubernetes/indexed-job.yaml")
    _, trainjob = documents_of("kubernetes/trainjob.yaml")
    (task,) = documents_of("skypilot/pretrain.yaml")
    scripts = [
        SBATCH.read_text(),
        indexed["spec"]["template"]["spec"]["containers"][0]["args"][0],
        trainjob["spec"]["trainer"]["args"][0],
        task["run"],
    ]
    for script in scripts:
        done = subprocess.run(
            ["shellcheck", "--shell", "bash", "-"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


# Ray, without Ray


@pytest.fixture
def ray_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_pretrain", DEPLOY / "ray" / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Handle:
    """An actor's handle: a call's result is what its method returns."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


class Ray:
    """What the file needs of the module ray."""

    @staticmethod
    def get(results: list[Any]) -> list[Any]:
        return results


def test_ray_names_its_first_node_host(ray_file: ModuleType) -> None:
    for node in (0, 1):
        command = ray_file.torchrun_command(
            node=node, nodes=2, gpus_per_node=8, addresses=["a", "b"], run_id="1f"
        )
        assert check_command(command) == rendezvous(node) | {
            "--rdzv-endpoint": "a:20031",  # 20000 + 0x1f
            "--rdzv-id": "1f",
            "--local-addr": "ab"[node],
        }


NODE_SCRIPT = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").write(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + ".ready", "w")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(15)
"""


def test_a_signal_to_rays_driver_saves_on_every_node(
    ray_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.py").write_text(NODE_SCRIPT)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shared"
    folder.mkdir()
    nodes = [ray_file.Node() for _ in range(2)]
    for number, node in enumerate(nodes):
        node.start([sys.executable, "node.py", f"saved{number}"], str(folder), 1)
    wait_until(lambda: len(list(folder.glob("*.ready"))) == 2)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop = ray_file.Stop()
        os.kill(os.getpid(), signal.SIGTERM)
        code = ray_file.wait_for(Ray, [Handle(n) for n in nodes], stop, poll_seconds=0.05)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert code == 75
    assert [(folder / f"saved{n}").read_text() for n in (0, 1)] == [str(SHUTDOWN_SECONDS)] * 2


def test_ray_stops_nodes_that_miss_one_that_failed(
    ray_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.py").write_text(NODE_SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_file, "OTHERS_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = ray_file.Stop()
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])
    nodes = [ray_file.Node() for _ in range(2)]
    nodes[0].start([sys.executable, "node.py", "saved0"], str(tmp_path), 1)
    wait_until((tmp_path / "saved0.ready").exists)
    nodes[1].start([sys.executable, "node.py", "saved1", "2"], str(tmp_path), 1)
    assert ray_file.wait_for(Ray, [Handle(n) for n in nodes], stop, poll_seconds=0.05) == 2
    assert (tmp_path / "saved0").exists()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([75, 75], 75), ([1, 75], 75), ([75, 2], 2), ([0, 1], 1), ([0, -9], 1)],
)
def test_ray_makes_one_code_of_many(ray_file: ModuleType, codes: list[int], expected: int) -> None:
    assert ray_file.job_code(codes) == expected


# The image


def test_the_dockerfile_needs_no_host_and_runs_as_a_normal_user() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]
    assert "://" not in text
    for name, argument in steps:
        if name == "COPY":
            *sources, _ = argument.split()
            assert all((ROOT / source).exists() for source in sources)
    users = [int(argument) for name, argument in steps if name == "USER"]
    assert len(users) == 1
    assert users[0] != 0
    assert json.loads(next(argument for name, argument in steps if name == "CMD"))
    # Pods run this file out of the image.
    place = next(argument for name, argument in steps if name == "WORKDIR")
    target = f"{place}/deploy/torchrun.py"
    assert ("COPY", "deploy/torchrun.py deploy/torchrun.py") in steps
    for file in ("kubernetes/indexed-job.yaml", "kubernetes/trainjob.yaml"):
        assert f"python {target} " in (DEPLOY / file).read_text()
