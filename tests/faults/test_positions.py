"""Stopped anywhere and resumed, on as many ranks as one likes: the same bits at the end.

Faults 11 and 12 of the list in `docs/reliability.md`. Dropout is on in every run.
"""

import json
from functools import partial
from pathlib import Path

import pytest

from bertsmith.errors import EXIT_INTERRUPTED
from bertsmith.memory.here import cpu_computes_bf16
from fault_harness.runs import checkpoints_of, fault, final_hashes, lines_of
from fault_harness.world import (
    EPOCH_STEPS,
    PACKS_PER_STEP,
    STEPS,
    TUNING_EPOCH_STEPS,
    TUNING_STEPS,
    World,
    abreast,
)

KILLED = -9
EACH_STEP = ("--save.every_steps", "1")
PRECISIONS = [
    "fp32",
    pytest.param(
        "bf16", marks=pytest.mark.skipif(not cpu_computes_bf16(), reason="this CPU has no bf16")
    ),
]


def killed_after(step: int) -> list[dict[str, object]]:
    """Faults: so many steps done, their checkpoint safe, and the next one just begun."""
    at = "bertsmith.train.step:train_step"
    return [fault(at, "await_save", nth=step + 1), fault(at, "kill", nth=step + 1)]


def killed_in(function: str, nth: int) -> list[dict[str, object]]:
    """Faults: in the n-th call of a function."""
    return [fault(f"bertsmith.model.heads:{function}", "kill", nth=nth)]


PRETRAINING = {
    "step 1": killed_after(1),
    "a step before the epoch ends": killed_after(EPOCH_STEPS - 1),
    "the epoch's end": killed_after(EPOCH_STEPS),
    "a step into the next epoch": killed_after(EPOCH_STEPS + 1),
    "the last step but one": killed_after(STEPS - 1),
    "inside accumulation": killed_in("MaskedLM.forward", 5 * PACKS_PER_STEP + 2),
    "inside evaluation": killed_in("MaskedLM.nats_and_right_M", 2),
}
TUNING = {
    "step 1": killed_after(1),
    "a step before the epoch ends": killed_after(TUNING_EPOCH_STEPS - 1),
    "the epoch's end": killed_after(TUNING_EPOCH_STEPS),
    "a step into the next epoch": killed_after(TUNING_EPOCH_STEPS + 1),
    "the last step but one": killed_after(TUNING_STEPS - 1),
    "inside accumulation": killed_in("SequenceClassifier.forward", 6),
    "inside evaluation": killed_in("SequenceClassifier.logits_NC", 2),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_resumed_at_any_position_a_run_ends_with_the_same_bits(
    verb: str, precision: str, world: World, tmp_path: Path
) -> None:
    words = getattr(world, verb)
    whole = tmp_path / "whole"
    world.zygote.run(words(whole, *EACH_STEP, "--precision", precision)).must()
    positions = PRETRAINING if verb == "pretrain" else TUNING

    def stopped(name: str) -> str | None:
        run = tmp_path / name
        line = words(run, *EACH_STEP, "--precision", precision)
        dead = world.zygote.run(line, *positions[name])
        assert dead.code == KILLED, dead.errors
        steps_done = checkpoints_of(run)[-1:]
        world.zygote.run([*line, "--resume"]).must()
        same = final_hashes(run) == final_hashes(whole) and lines_of(run) == lines_of(whole)
        return None if same else f"stopped at {name}, resumed from {steps_done}: another result"

    wrong = [said for said in abreast([partial(stopped, name) for name in positions]) if said]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "more",
    [
        ("--optim.schedule", "cosine"),
        ("--optim.schedule", "wsd", "--optim.decay_share", "0.5"),
        ("--optim.schedule", "constant", "--optim.warmup_steps", "9"),
        ("--epochs", "2"),
        ("--tokens", "3500"),
    ],
)
def test_resumed_within_warmup_and_decay_of_any_schedule_and_budget(
    more: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    def words(name: str) -> list[str]:
        line = world.pretrain(tmp_path / name, *more)
        if more[0] in ("--epochs", "--tokens"):
            at = line.index("--steps")
            del line[at : at + 2]
        return line

    def stopped() -> None:
        for _ in range(2):  # after steps 4 and 8
            dead = world.zygote.run([*words("stopped"), "--resume"], *killed_after(4))
            assert dead.code == KILLED, dead.errors
        world.zygote.run([*words("stopped"), "--resume"]).must()

    abreast([stopped, lambda: world.zygote.run(words("whole")).must()])
    assert final_hashes(tmp_path / "stopped") == final_hashes(tmp_path / "whole")
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")


def test_a_budget_of_minutes_counts_those_before_the_stop(world: World, tmp_path: Path) -> None:
    """As slow as they are made, fewer than 50 steps fill it, whatever the stop."""
    slow = fault("bertsmith.train.step:train_step", "sleep:0.06", last=0)
    line = world.pretrain(tmp_path / "run", "--save.every_steps", "1", "--minutes", "0.05")
    at = line.index("--steps")
    del line[at : at + 2]
    dead = world.zygote.run(line, slow, fault("bertsmith.train.step:train_step", "kill", nth=25))
    if dead.code == 0:
        pytest.skip("the machine is too busy for 25 steps in 3 seconds")
    assert dead.code == KILLED, dead.errors
    world.zygote.run([*line, "--resume"], slow).must()
    last = tmp_path / "run" / "checkpoints" / f"step-{checkpoints_of(tmp_path / 'run')[-1]}"
    state = json.loads((last / "training_state.json").read_bytes())["state"]
    assert state["step"] < 60
    assert state["elapsed_seconds"] >= 3.0


def test_a_finished_run_is_resumed_to_the_same_end(world: World, tmp_path: Path) -> None:
    line = world.pretrain(tmp_path / "run")
    world.zygote.run(line).must()
    world.zygote.run([*line, "--resume"]).must()
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert lines_of(tmp_path / "run") == lines_of(world.pretrained)


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_a_finished_run_is_resumed_as_often_as_one_likes(
    verb: str, world: World, tmp_path: Path
) -> None:
    """Its end is judged again each time: that counts for nothing, and is written once."""
    run = tmp_path / "run"
    line = getattr(world, verb)(run)
    world.zygote.run(line).must()
    hashes, lines = final_hashes(run), lines_of(run)
    for _ in range(2):
        world.zygote.run([*line, "--resume"]).must()
        assert lines_of(run) == lines
        assert final_hashes(run) == hashes


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_an_owed_evaluation_that_was_made_and_lost_again_is_written_once(
    verb: str, world: World, tmp_path: Path
) -> None:
    """Told to stop in the first evaluation, killed in the step after it was made up for."""
    function = "MaskedLM.nats_and_right_M" if verb == "pretrain" else "SequenceClassifier.logits_NC"
    told = fault(f"bertsmith.model.heads:{function}", "signal:SIGTERM")
    whole, run = tmp_path / "whole", tmp_path / "run"
    more = ("--tokens_per_pack", "32") if verb == "finetune" else ()
    more = (*more, "--save.every_steps", "100")
    world.zygote.run(getattr(world, verb)(whole, *more)).must()
    line = getattr(world, verb)(run, *more)
    world.zygote.run(line, told).must(EXIT_INTERRUPTED)
    saved = run / "checkpoints" / "step-5" / "training_state.json"
    assert json.loads(saved.read_bytes())["state"]["owes_evaluation"]
    dead = world.zygote.run([*line, "--resume"], *killed_after(1))
    assert dead.code == KILLED, dead.errors
    assert 5 in [values["step"] for values in lines_of(run) if "valid_loss" in values]
    world.zygote.run([*line, "--resume"]).must()
    assert lines_of(run) == lines_of(whole)
    assert final_hashes(run) == final_hashes(whole)


def test_nothing_to_resume_is_a_start(world: World, tmp_path: Path) -> None:
    done = world.zygote.run([*world.pretrain(tmp_path / "run"), "--resume"]).must()
    assert "starting anew" in done.errors
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)


def test_run_yaml_alone_repeats_a_run(world: World, tmp_path: Path) -> None:
    config = world.pretrained / "run.yaml"
    again = ["pretrain", "--config", str(config), "--output", str(tmp_path / "again")]
    world.zygote.run(again).must()
    assert final_hashes(tmp_path / "again") == final_hashes(world.pretrained)


@pytest.mark.parametrize(
    "course",
    [
        (("none", 1), ("ddp", 2), ("fsdp", 2), ("none", 1)),
        (("fsdp", 2), ("ddp", 2), ("none", 1), ("fsdp", 2)),
    ],
)
def test_a_run_moves_between_one_and_two_ranks_and_between_strategies(
    course: tuple[tuple[str, int], ...], world: World, tmp_path: Path
) -> None:
    """Killed three times, each time to go on elsewhere."""
    for number, (strategy, size) in enumerate(course):
        line = world.pretrain(tmp_path / "run", *EACH_STEP, "--parallel.strategy", strategy)
        is_last = number == len(course) - 1
        faults = [] if is_last else killed_after(4)
        start = world.zygote.start_ranks if size > 1 else world.zygote.start
        ranks = start([*line, "--resume"], *faults)
        for rank in ranks if isinstance(ranks, list) else [ranks]:
            assert rank.end().code == (0 if is_last else KILLED), rank.errors()
    assert final_hashes(tmp_path / "run") == final_hashes(world.pretrained)
    assert lines_of(tmp_path / "run") == lines_of(world.pretrained)


def test_fine_tuning_on_two_ranks_is_resumed_with_the_same_bits(
    world: World, tmp_path: Path
) -> None:
    for name in ("whole", "stopped"):
        line = world.finetune(tmp_path / name, *EACH_STEP, "--parallel.strategy", "ddp")
        if name == "stopped":
            for rank in world.zygote.start_ranks(line, *killed_after(6)):
                assert rank.end().code == KILLED, rank.errors()
        for rank in world.zygote.start_ranks([*line, "--resume"]):
            rank.end().must()
    assert final_hashes(tmp_path / "stopped") == final_hashes(tmp_path / "whole")
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "course",
    [
        (("none", 1), ("fsdp", 2), ("none", 1)),
        (("fsdp", 2), ("ddp", 2), ("fsdp", 2)),
    ],
)
def test_fine_tuning_moves_between_one_and_two_ranks_and_between_strategies(
    course: tuple[tuple[str, int], ...], world: World, tmp_path: Path
) -> None:
    """Though under fsdp alone the whole token table is trained. Steps have two packs each.

    Two packs, shared out over two ranks or not, are the same sum of two gradients.
    """

    def words(run: Path, strategy: str) -> list[str]:
        more = (
            "--examples_per_step",
            "2",
            "--tokens_per_pack",
            "16",
            "--max_sequence_tokens",
            "16",
        )
        return world.finetune(run, *EACH_STEP, *more, "--parallel.strategy", strategy)

    world.zygote.run(words(tmp_path / "whole", "none")).must()
    run = tmp_path / "run"
    for number, (strategy, size) in enumerate(course):
        line = [*words(run, strategy), "--resume"]
        is_last = number == len(course) - 1
        faults = [] if is_last else killed_after(4)
        start = world.zygote.start_ranks if size > 1 else world.zygote.start
        ranks = start(line, *faults)
        for rank in ranks if isinstance(ranks, list) else [ranks]:
            assert rank.end().code == (0 if is_last else KILLED), rank.errors()
    assert final_hashes(run) == final_hashes(tmp_path / "whole")
    assert lines_of(run) == lines_of(tmp_path / "whole")
