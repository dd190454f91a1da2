"""Which rank this process is: told by torchrun or by SLURM, never guessed. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bertsmith.parallel import last_word

SLURM_FIRST_PORT, SLURM_PORTS = 20_000, 20_000
"""Ports for the rendezvous of SLURM jobs; a job's own follows from its number."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process among those of a run."""

    rank: int
    size: int
    """Processes of the run."""

    local_rank: int
    """Number on its machine: the GPU it uses."""

    local_size: int
    """Processes of the run on this machine."""

    host: str
    port: int
    """Where the processes meet."""

    has_agent: bool
    """Whether torchrun's agent holds the meeting point, so that it outlives any rank."""

    run_id: str
    """The same for all processes of a run, and when torchrun starts them anew."""

    has_own_gpus: bool = False
    """Whether each process is shown GPUs of its own, as `srun --gpus-per-task` does."""

    def seeing(self, num_gpus: int) -> "Place":
        """This place with the number of a GPU that there is, of those that this process sees."""
        return replace(self, local_rank=self.local_rank % num_gpus)


def place_from(environ: Mapping[str, str]) -> Place | None:
    """This process's place, or None if it was started by hand.

    torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and their like; of srun's variables only those are
    read that it sets within a step of several tasks, so that a batch script is no rank.

    Raises:
        ValueError: A variable is missing or no number; its name is in the message.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Place(
            rank=_int(environ, "RANK"),
            size=_int(environ, "WORLD_SIZE"),
            local_rank=_int(environ, "LOCAL_RANK"),
            local_size=_int(environ, "LOCAL_WORLD_SIZE", default=1),
            host=_text(environ, "MASTER_ADDR"),
            port=_int(environ, "MASTER_PORT"),
            has_agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=environ.get("TORCHELASTIC_RUN_ID", "run"),
        )
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        job = _int(environ, "SLURM_JOB_ID")
        return Place(
            rank=_int(environ, "SLURM_PROCID"),
            size=_int(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_int(environ, "SLURM_LOCALID"),
            local_size=_tasks_on_node(environ),
            host=environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_STEP_NODELIST")),
            port=int(environ.get("MASTER_PORT") or SLURM_FIRST_PORT + job % SLURM_PORTS),
            has_agent=False,
            run_id=str(job),
            has_own_gpus=_binds_gpus(environ),
        )
    return None


def program_of(environ: Mapping[str, str]) -> list[str]:
    """The words that start bertsmith with as many processes as this run has, its verb to follow.

    Where torchrun runs on several machines, it has to be started so on each.
    """
    place = place_from(environ)
    if place is None or last_word.FOLDER in environ:  # by hand, or by `--parallel.devices`
        return ["bertsmith"]
    if "RANK" not in environ:
        return ["srun", "--ntasks", str(place.size), "bertsmith"]
    words = ["torchrun", "--nproc-per-node", str(place.local_size)]
    if (num_machines := -(-place.size // place.local_size)) > 1:
        words += ["--nnodes", str(num_machines), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", place.host]
    return [*words, "-m", "bertsmith"]


def first_host(nodelist: str) -> str:
    """The first of SLURM's hosts: `gpu[07-09,12],login` is gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\](.*?))?(?:,|$)", nodelist)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodelist!r} names no host")
    stem, number, _ = match.groups()
    return stem + (number or "")


def _binds_gpus(environ: Mapping[str, str]) -> bool:
    """Whether srun shows each task GPUs of its own: by their number a task, or by a binding."""
    return (
        "SLURM_GPUS_PER_TASK" in environ
        or "gres/gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or environ.get("SLURM_GPU_BIND", "none") != "none"
    )


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE: `4(x2),3` means 4, 4 and 3."""
    counts: list[int] = []
    for part in _text(environ, "SLURM_STEP_TASKS_PER_NODE").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE has {part!r}, which is no count")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[_int(environ, "SLURM_NODEID", default=0)]


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(f"{name} is not set; start with torchrun, srun, or --parallel.devices N")
    return environ[name]


def _int(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a whole number")
    return int(text)
