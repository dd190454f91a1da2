"""Ranks are told by torchrun or srun, and by nobody else."""

import pytest

from bertsmith.parallel.place import first_host, place_from

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
    assert place.generation == "job/2/8"


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
