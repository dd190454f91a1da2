"""Ranks are told by torchrun or srun, and by nobody else."""

import pytest

from bertsmith.errors import UserError
from bertsmith.parallel.choice import Devices, processes_to_start
from bertsmith.parallel.config import ParallelConfig
from bertsmith.parallel.place import first_host, place_from, program_of
from ranks import environment_of

SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_a_process_started_by_hand_is_no_rank() -> None:
    assert place_from({}) is None


def test_torchrun_tells_everything() -> None:
    place = place_from(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node-a",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.host, place.port, place.has_agent) == ("node-a", 29500, True)
    assert place.run_id == "job"


def test_a_restart_that_one_node_alone_counts_changes_nothing() -> None:
    """Each node's agent counts its own restarts, so ranks must not go by it."""
    told = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
    }
    first, second = (place_from(told | {"TORCHELASTIC_RESTART_COUNT": n}) for n in ("0", "1"))
    assert first == second


@pytest.mark.parametrize(
    "told",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:1"},
        {"SLURM_GPU_BIND": "single:1"},
    ],
)
def test_a_task_of_srun_may_see_one_gpu_alone(told: dict[str, str]) -> None:
    place = place_from(SRUN | told)
    assert place is not None
    assert place.local_rank == 1
    assert place.seeing(1).local_rank == 0
    one = Devices(kind="cuda", count=1)
    assert processes_to_start(ParallelConfig(), one, SRUN | told) is None


def test_tasks_that_share_too_few_gpus_are_refused() -> None:
    place = place_from(SRUN | {"SLURM_GPU_BIND": "none"})
    assert place is not None
    assert place.seeing(4) == place
    with pytest.raises(UserError, match="4 processes on a machine with 2 GPUs"):
        processes_to_start(ParallelConfig(), Devices(kind="cuda", count=2), SRUN)


def test_a_step_of_srun_tells_everything() -> None:
    place = place_from(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.host, place.port, place.has_agent) == ("gpu07", 20_000 + 123456 % 20_000, False)


def test_a_batch_script_or_a_step_of_one_task_is_no_rank() -> None:
    batch = {k: v for k, v in SRUN.items() if "STEP" not in k} | {"SLURM_NTASKS": "8"}
    assert place_from(batch) is None
    assert place_from(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("rack1-n[1,3]", "rack1-n1"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_unequal_nodes() -> None:
    place = place_from(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"})
    assert place is not None
    assert place.local_size == 3


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_PROCID is 'five'"):
        place_from(SRUN | {"SLURM_PROCID": "five"})


def test_a_run_goes_on_as_it_was_started() -> None:
    torchrun = ["torchrun", "--nproc-per-node", "2", "-m", "bertsmith"]
    assert program_of({}) == ["bertsmith"]
    assert program_of(environment_of(1, 2, 29500)) == torchrun
    ours = environment_of(1, 2, 29500) | {"BERTSMITH_LAST_WORDS": "/tmp/words"}
    assert program_of(ours) == ["bertsmith"]  # run.yaml says how many
    assert program_of(SRUN) == ["srun", "--ntasks", "8", "bertsmith"]


def test_of_several_machines_each_starts_its_own() -> None:
    found = program_of(environment_of(5, 8, 29500) | {"LOCAL_WORLD_SIZE": "4"})
    assert found == [
        *("torchrun", "--nproc-per-node", "4", "--nnodes", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1", "-m", "bertsmith"),
    ]
