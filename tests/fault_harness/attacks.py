"""Attacks on a run, for the tests and for the long versions in `benchmarks/faults.py`."""

import hashlib
import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fault_harness.runs import (
    MANIFEST,
    PATIENCE_SECONDS,
    Zygote,
    checkpoints_of,
    fault,
    final_hashes,
    is_whole,
    lines_of,
    whole_checkpoints,
)
from fault_harness.world import STEPS, World

KILLED = -signal.SIGKILL
TRAIN_STEP = "bertsmith.train.step:train_step"
PACED = tuple(fault(TRAIN_STEP, "await_save", nth=step + 1) for step in (4, 8, 12))
"""Faults: steps that wait for the save before them, or a busy disk would make the next one later,
and runs would differ in what they save."""


OWN_DIGEST = "sha256_of_the_above"
"""Of the manifest, over its text without this line."""

Damage = Callable[[Path], None]
"""Does something to the folder of a checkpoint."""


def journaled(world: World, folder: Path, words: Sequence[str]) -> None:
    """Run to the end, with a journal."""
    world.zygote.run(
        words,
        *PACED,
        environment={
            "BERTSMITH_TEST_JOURNAL": str(folder / "journal"),
            "BERTSMITH_TEST_JOURNAL_ROOT": str(folder / "run"),
        },
    ).must()


def kill_at(world: World, output: Path, nth: int) -> str | None:
    """Kill at the n-th call and go on; what is wrong with the result."""
    words = world.pretrain(output)
    killed = fault("disk", "kill", path=f"{output}(/|$)", nth=nth)
    dead = world.zygote.run(words, *PACED, killed)
    if dead.code != KILLED:
        return f"was not killed but ended with {dead.code}: {dead.errors[-300:]}"
    saved = whole_checkpoints(output)
    again = world.zygote.run([*words, "--resume"])
    if again.code:
        return f"cannot go on: {again.errors[-300:]}"
    if saved and f"step-{saved[-1]}" not in again.errors:
        return f"does not go on from step {saved[-1]}"
    return difference(output, world.pretrained)


def difference(run: Path, other: Path) -> str | None:
    """What two runs differ in: weights, moments, state, model or the lines of metrics."""
    if final_hashes(run) != final_hashes(other):
        return "other weights or state at the end"
    if lines_of(run) != lines_of(other):
        return f"other lines of metrics: {[line['step'] for line in lines_of(run)]}"
    left = [path.name for path in run.rglob(".*")]
    return f"left behind: {left}" if left else None


def kill_at_random(
    zygote: Zygote,
    words: Sequence[str],
    run: Path,
    *,
    times: int,
    size: int = 1,
    seed: int = 0,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Start a run again and again, and kill one rank each time; at last let it end.

    Every fourth kill comes at any moment of the start, the others when steps are being made,
    however slow the machine starts.

    Args:
        zygote: Starts them.
        words: The command line.
        run: Its run folder.
        times: How often.
        size: Ranks.
        seed: Of the moments.
        patience_seconds: How long the start that is not killed may take.

    Returns:
        How often it was killed before it had ended.
    """
    rng = random.Random(seed)
    kills = 0
    for attempt in range(times + 1):
        before = _opened(run)
        # A rank that is killed before it has met the others is waited for, so long.
        again = [*words, "--resume", "--parallel.join_seconds", "20"]
        ranks = zygote.start_ranks(again, size=size)
        if attempt < times:
            give_up = time.monotonic() + PATIENCE_SECONDS
            while attempt % 4 and _opened(run) == before and ranks[0].code() is None:
                assert time.monotonic() < give_up, ranks[0].errors()
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.5) * size)
            ranks[rng.randrange(size)].kill()
        codes = [rank.end(within_seconds=patience_seconds).code for rank in ranks]
        kills += KILLED in codes
    assert codes == [0] * size, "\n".join(rank.errors() for rank in ranks)
    return kills


def _opened(run: Path) -> int:
    """Changes when a start has opened the metrics, just before its first step."""
    path = run / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else 0


def files_of(run: Path) -> list[str]:
    """Names of a checkpoint's files."""
    return sorted(path.name for path in (run / "checkpoints" / f"step-{STEPS}").iterdir())


def add_checkpoint(run: Path, step: int) -> Path:
    """A whole checkpoint of a later step, which holds the same numbers as the last one."""
    added = run / "checkpoints" / f"step-{step}"
    shutil.copytree(run / "checkpoints" / f"step-{STEPS}", added)
    state, manifest = (
        json.loads((added / name).read_bytes()) for name in ("training_state.json", MANIFEST)
    )
    state["state"]["step"] = step
    content = (json.dumps(state, indent=2) + "\n").encode()
    (added / "training_state.json").write_bytes(content)
    manifest["files"]["training_state.json"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    manifest["step"] = step
    del manifest[OWN_DIGEST]
    manifest[OWN_DIGEST] = hashlib.sha256(
        (json.dumps(manifest, indent=2) + "\n").encode()
    ).hexdigest()
    (added / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    assert is_whole(added)
    return added


def flip(seed: int) -> tuple[str, Damage]:
    """One bit, of a file and at a place that the seed chooses."""

    def damage(checkpoint: Path) -> None:
        rng = random.Random(seed)
        file = rng.choice(sorted(checkpoint.iterdir()))
        content = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(content)

    return f"bit {seed}", damage


def cut(name: str, share: float, less: int) -> tuple[str, Damage]:
    """A file that ends too soon."""

    def damage(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: int(len(content) * share) - less])

    return f"{name} cut", damage


def remove(name: str) -> tuple[str, Damage]:
    """A file that is not there."""
    return f"{name} missing", lambda checkpoint: (checkpoint / name).unlink()


def cuts_and_losses(run: Path) -> list[tuple[str, Damage]]:
    """Each file of a checkpoint cut to nothing, to half and by a byte, and each missing."""
    damages = []
    for name in files_of(run):
        damages += [cut(name, 0.0, 0), cut(name, 0.5, 0), cut(name, 1.0, 1), remove(name)]
    return damages


def check_all_are_passed_over(
    world: World, run: Path, damages: list[tuple[str, Damage]]
) -> list[str]:
    """One run over all the damage; the line that it says of each, in their order."""
    first = STEPS + 1
    for number, (_, damage) in enumerate(damages):
        damage(add_checkpoint(run, first + number))
    done = world.zygote.run([*world.pretrain(run), "--resume"]).must()
    assert f"resumed from {run}/checkpoints/step-{STEPS}\n" in done.errors
    lines = []
    for number, (what, _) in enumerate(damages):
        named = re.findall(rf".*/step-{first + number}\b.*", done.errors)
        assert len(named) == 1, f"{what}: {named}"
        lines += named
    assert final_hashes_are_kept(world, run)
    return lines


def final_hashes_are_kept(world: World, run: Path) -> bool:
    """Damaged ones are out of the way, and the run is what it was."""
    return checkpoints_of(run)[-1] == STEPS and final_hashes(run) == final_hashes(world.pretrained)
