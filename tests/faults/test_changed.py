"""What is not the same run is refused with a readable difference; two runs share no folder.

Faults 10 and 13 of the list in `docs/reliability.md`.
"""

import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from bertsmith.errors import EXIT_USER_ERROR
from fault_harness.runs import fault, final_hashes, metrics_of, until, whole_checkpoints
from fault_harness.world import World

KILLED = -9


@pytest.fixture
def stopped(world: World, tmp_path: Path) -> Path:
    """A run that was killed in its tenth step, a checkpoint of an earlier one on disk."""
    waits = fault("bertsmith.train.step:train_step", "sleep:60", nth=10)
    run = world.zygote.start(world.pretrain(tmp_path / "run"), waits)
    until(lambda: 9 in [line["step"] for line in metrics_of(tmp_path / "run")], run)
    until(lambda: bool(whole_checkpoints(tmp_path / "run")), run)
    run.kill()
    assert run.end().code == KILLED
    return tmp_path / "run"


def content_of(run: Path) -> dict[str, str]:
    """sha256 of each file that a run may not change when it is refused."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file() and path.name not in ("run.lock", "log.txt")
    }


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("optim.learning_rate", "0.005", "0.001"),
        ("tokens_per_step", "256", "512"),
        ("packing.max_sequence_tokens", "32", "12"),
        ("seed", "0", "7"),
    ],
)
def test_a_changed_setting_is_refused_with_both_values_and_taken_when_it_is_named(
    key: str, before: str, after: str, world: World, stopped: Path
) -> None:
    line = [*world.pretrain(stopped), f"--{key}", after, "--resume"]
    held = content_of(stopped)
    for more in ([], ["--resume.override", "optim.weight_decay"]):
        refused = world.zygote.run([*line, *more]).must(EXIT_USER_ERROR)
        (told,) = [text for text in refused.errors.splitlines() if "error:" in text]
        for word in (key, before, after):
            assert word in told
        assert content_of(stopped) == held
    done = world.zygote.run([*line, "--resume.override", key]).must()
    assert "resumed from" in done.errors
    assert final_hashes(stopped) != final_hashes(world.pretrained)


def test_a_change_that_was_accepted_survives_a_kill_at_any_time(
    world: World, stopped: Path, tmp_path: Path
) -> None:
    """While the first checkpoint with the new setting is written, and in the step after it.

    What goes on then is the command of `run_status.json`, or the one of a job script without the
    override.
    """
    changed = [*world.pretrain(stopped), "--optim.learning_rate", "0.001", "--resume"]
    saving = fault("fsync", "kill", path=r"/\.tmp-step-")
    dead = world.zygote.run([*changed, "--resume.override", "optim.learning_rate"], saving)
    assert dead.code == KILLED, dead.errors
    by_status = ["pretrain", "--config", str(stopped / "run.yaml"), "--resume"]
    at = "bertsmith.train.step:train_step"
    first_step = [fault(at, "sleep:1", nth=1), fault(at, "kill", nth=1)]
    dead = world.zygote.run(by_status, *first_step)
    assert dead.code == KILLED, dead.errors
    assert "resumed in spite of a change: optim.learning_rate was 0.005, is 0.001" in dead.errors
    assert "resume_override" not in (stopped / "run.yaml").read_text()
    done = world.zygote.run(changed).must()
    assert "in spite of" not in done.errors


def test_one_changed_word_of_the_data_is_refused(world: World, stopped: Path) -> None:
    other = stopped.parent / "text"
    shutil.copytree(world.root / "text", other)
    text = (other / "part-0.txt").read_text()
    (other / "part-0.txt").write_text(text.replace(text.split()[3], text.split()[4], 1))
    words = world.prepare(
        stopped.parent / "prepared", "--tokenizer", str(world.root / "prepared" / "tokenizer")
    )
    words[words.index("--input") + 1] = str(other)
    at = words.index("--vocab_size")
    del words[at : at + 2]
    world.zygote.run(words).must()
    line = [*world.pretrain(stopped), "--data", str(stopped.parent / "prepared"), "--resume"]
    refused = world.zygote.run(line).must(EXIT_USER_ERROR)
    assert "data" in refused.errors
    assert "Traceback" not in refused.errors


def test_the_same_data_elsewhere_and_what_changes_no_result_are_taken(
    world: World, stopped: Path
) -> None:
    shutil.copytree(world.root / "prepared", stopped.parent / "moved")
    line = [*world.pretrain(stopped), "--data", str(stopped.parent / "moved"), "--resume"]
    world.zygote.run([*line, "--save.keep_last", "5", "--log_every_steps", "2"]).must()
    assert final_hashes(stopped) == final_hashes(world.pretrained)


def test_a_second_run_in_the_folder_is_refused_by_name_and_a_dead_ones_lock_is_taken_over(
    world: World, tmp_path: Path
) -> None:
    line = world.pretrain(tmp_path / "run")
    waits = fault("bertsmith.train.step:train_step", "sleep:60", nth=10)
    first = world.zygote.start(line, waits)
    until((tmp_path / "run" / "metrics.jsonl").exists, first)
    for more in (["--resume"], ["--overwrite"]):
        second = world.zygote.run([*line, *more]).must(EXIT_USER_ERROR)
        assert str(first.process_id) in second.errors
        assert socket.gethostname() in second.errors
    first.kill()
    assert first.end().code == KILLED
    assert (tmp_path / "run" / "run.lock").exists()
    world.zygote.run([*line, "--resume"]).must()
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert not (tmp_path / "run" / "run.lock").exists()


def test_two_runs_that_start_at_once_are_one_run(world: World, tmp_path: Path) -> None:
    line = [*world.pretrain(tmp_path / "run"), "--resume"]
    slow = fault("bertsmith.train.step:train_step", "sleep:0.1", last=0)
    ends = [run.end() for run in [world.zygote.start(line, slow) for _ in range(3)]]
    assert sorted(end.code for end in ends) == [0, EXIT_USER_ERROR, EXIT_USER_ERROR]
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_the_status_says_how_a_run_stands(world: World, stopped: Path) -> None:
    """A killed run cannot say that it is dead; its process number tells."""
    told = json.loads((stopped / "run_status.json").read_bytes())
    assert told["status"] == "running"
    with pytest.raises(ProcessLookupError):
        os.kill(told["pid"], 0)
    world.zygote.run([*world.pretrain(stopped), "--resume"]).must()
    told = json.loads((stopped / "run_status.json").read_bytes())
    assert (told["status"], told["step"]) == ("completed", 16)
