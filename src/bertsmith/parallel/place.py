"""Which rank this process is: told by torchrun or by SLURM, never guessed. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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

    generation: str
    """Differs between the starts of a run that torchrun restarts."""


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
            generation="/".join(
                environ.get(name, "0")
                for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
            ),
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
            generation=f"{job}/{environ.get('SLURM_RESTART_COUNT', '0')}",
        )
    return None


def first_host(nodelist: str) -> str:
    """The first of SLURM's hosts: `gpu[07-09,12],login` is gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\](.*?))?(?:,|$)", nodelist)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodelist!r} names no host")
    stem, number, _ = match.groups()
    return stem + (number or "")


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
