"""Break runs many times over, and count how often the end is the same to the bit.

    python benchmarks/faults.py [--part kills calls processes damage disk cost] [--quick]

- kills: kill -9 at random moments of one run, 100 times in one process, 20 times in two ranks.
- calls: kill -9 at every call on the disk (fsync, rename, unlink, rmdir) of a whole run.
- processes: the same with whole processes instead of forks, and through strace where it is there.
- damage: flipped bits, torn files, missing files; each has to be noticed before it is used.
- disk: an error of the disk at every flush and rename of a save, under both policies.
- cost: what a save of BERT-base costs a run, and what verifying one takes.

A run survives if its weights, moments, state and lines of metrics are those of the run that nothing
stopped. Runs are forks of a process that has imported bertsmith (`tests/fault_harness`), but for
`processes`. The short versions, and faults that repeating shows no better, are in `tests/faults`.
`--quick` tries a few of each.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from fault_harness.attacks import (  # noqa: E402
    KILLED,
    check_all_are_passed_over,
    cuts_and_losses,
    difference,
    flip,
    journaled,
    kill_at,
    kill_at_random,
)
from fault_harness.journal import read_journal  # noqa: E402
from fault_harness.runs import (  # noqa: E402
    Ended,
    Zygote,
    checkpoints_of,
    environment_with,
    fault,
    whole_checkpoints,
)
from fault_harness.world import World, abreast  # noqa: E402
from run_all import installed_minilm, machine  # noqa: E402

PARTS = ("kills", "calls", "processes", "damage", "disk", "cost")

PATIENCE_SECONDS = 1800.0
"""How long one long run may take on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, and how the runs fared."""

    fault: str
    tried: int
    survived: int
    seconds: float
    wrong: list[str]
    """What was wrong, of the first few."""


def row(fault: str, seconds: float, outcomes: Sequence[str | None]) -> Row:
    """Count outcomes: None survived."""
    wrong = [outcome for outcome in outcomes if outcome]
    made = Row(
        fault=fault,
        tried=len(outcomes),
        survived=len(outcomes) - len(wrong),
        seconds=round(seconds, 1),
        wrong=wrong[:5],
    )
    print(asdict(made), file=sys.stderr, flush=True)
    return made


def timed(call: Callable[[], Sequence[str | None]], fault: str) -> Row:
    """Run an attack."""
    started = time.perf_counter()
    outcomes = call()
    return row(fault, time.perf_counter() - started, outcomes)


def measure_kills(world: World, scratch: Path, *, quick: bool) -> list[Row]:
    """One long run, killed again and again."""
    rows = []
    for size, times in ((1, 100), (2, 20)):
        kills = times // 10 if quick else times
        steps = kills * 40
        more = ("--steps", str(steps), "--eval.every_steps", "50", "--save.every_steps", "5")
        whole = scratch / f"whole-{size}"
        words = world.pretrain(whole, *more)
        world.zygote.start(words).end(within_seconds=PATIENCE_SECONDS).must()
        run = scratch / f"killed-{size}"
        started = time.perf_counter()
        done = kill_at_random(
            world.zygote,
            world.pretrain(run, *more),
            run,
            times=kills,
            size=size,
            patience_seconds=PATIENCE_SECONDS,
        )
        said = difference(run, whole)
        made = Row(
            fault=f"kill -9 at random moments of one run of {steps:,} steps, ranks: {size}",
            tried=done,
            survived=0 if said else done,
            seconds=round(time.perf_counter() - started, 1),
            wrong=[said] if said else [],
        )
        print(asdict(made), file=sys.stderr, flush=True)
        rows.append(made)
    return rows


def measure_calls(world: World, scratch: Path, *, quick: bool) -> list[Row]:
    """Kill at each call on the disk, and go on."""
    journaled(world, scratch, world.pretrain(scratch / "run"))
    calls = list(read_journal(scratch / "journal"))
    chosen = range(1, len(calls) + 1, 10 if quick else 1)
    jobs = [partial(kill_at, world, scratch / str(nth), nth) for nth in chosen]
    return [timed(lambda: abreast(jobs), "kill -9 before each call on the disk of a run")]


def run_process(words: Sequence[str], *faults: dict[str, Any], strace: str = "") -> Ended:
    """Bertsmith as a process of its own, perhaps under strace with an injection."""
    program = [sys.executable, "-m", "bertsmith", *words]
    if strace:
        program = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={strace}", *program]
    done = subprocess.run(
        program, env=environment_with(*faults), capture_output=True, text=True, check=False
    )
    code = -9 if done.returncode in (137, -9) else done.returncode
    return Ended(code, done.stdout, done.stderr)


def survives(world: World, output: Path, killed: Ended) -> str | None:
    """Go on in a process of its own; what is wrong in the end."""
    if killed.code != KILLED:
        return f"was not killed but ended with {killed.code}: {killed.errors[-300:]}"
    again = run_process([*world.pretrain(output), "--resume"])
    if again.code:
        return f"cannot go on: {again.errors[-300:]}"
    return difference(output, world.pretrained)


def measure_processes(world: World, scratch: Path, *, quick: bool) -> list[Row]:
    """The same with real starts of Python: fewer calls, since each takes seconds."""
    journaled(world, scratch, world.pretrain(scratch / "run"))
    calls = list(read_journal(scratch / "journal"))
    names = ("fsync", "rename")
    chosen = [n + 1 for n, call in enumerate(calls) if call.name in names]
    chosen = chosen[:: 20 if quick else 2]

    def by_hook(nth: int) -> str | None:
        output = scratch / f"hook-{nth}"
        killed = fault("disk", "kill", path=f"{output}(/|$)", nth=nth)
        return survives(world, output, run_process(world.pretrain(output), killed))

    def by_strace(nth: int) -> str | None:
        output = scratch / f"strace-{nth}"
        words = world.pretrain(output)
        return survives(world, output, run_process(words, strace=f"rename:signal=KILL:when={nth}"))

    rows = [
        timed(
            lambda: abreast([partial(by_hook, nth) for nth in chosen]),
            "kill -9 before a flush or rename, whole processes",
        )
    ]
    if shutil.which("strace"):
        renames = range(1, 1 + sum(call.name == "rename" for call in calls), 4 if quick else 1)
        rows.append(
            timed(
                lambda: abreast([partial(by_strace, nth) for nth in renames]),
                "kill -9 at each rename by strace, whole processes",
            )
        )
    return rows


def measure_damage(world: World, scratch: Path, *, quick: bool) -> list[Row]:
    """Many damaged checkpoints in one folder: each has to be passed over."""
    rows = []
    flips = [flip(seed) for seed in range(15 if quick else 150)]
    for name, damages in (
        ("flipped bit in any file of a checkpoint, noticed before use", flips),
        ("file of a checkpoint cut or missing, noticed", cuts_and_losses(world.pretrained)),
    ):
        run = scratch / name.split()[0]
        shutil.copytree(world.pretrained, run)
        started = time.perf_counter()
        said = ""
        try:
            check_all_are_passed_over(world, run, damages)
        except AssertionError as error:
            said = str(error).strip()[:300] or "not passed over"
        made = row(name, time.perf_counter() - started, [said or None] * len(damages))
        rows.append(made)
    return rows


def measure_disk(world: World, scratch: Path, *, quick: bool) -> list[Row]:
    """An error at each flush and rename of the second save; the run goes on, or can go on."""
    journaled(world, scratch, world.pretrain(scratch / "run"))
    pattern = r"step-8"
    calls = [
        call
        for call in read_journal(scratch / "journal")
        if call.name in ("fsync", "rename") and pattern in call.paths[-1]
    ]

    def attack(number: str, nth: int, policy: str) -> str | None:
        output = scratch / f"{number}-{nth}-{policy}"
        words = world.pretrain(output, "--save.on_disk_error", policy)
        # Unlink has to work: what is partial is removed even on a disk that is full.
        at, count = ("fsync", nth) if calls[nth].name == "fsync" else ("rename", 0)
        ended = world.zygote.run(words, fault(at, number, path=pattern, nth=count + 1))
        if "Traceback" in ended.errors or ended.code not in (0, 75):
            return f"{number} at {at} {nth}: ended with {ended.code}: {ended.errors[-300:]}"
        if whole_checkpoints(output) != checkpoints_of(output):
            return f"{number} at {at} {nth}: a torn checkpoint"
        if ended.code:
            world.zygote.run([*words, "--resume"])
        return difference(output, world.pretrained)

    rows = []
    for policy in ("continue", "stop"):
        jobs = [
            partial(attack, number, nth, policy)
            for number in ("ENOSPC", "EIO", "EROFS")
            for nth in range(0, len(calls), 5 if quick else 1)
        ]
        what = f"full, broken or read-only disk at each call of a save, policy {policy}"
        rows.append(timed(partial(abreast, jobs), what))
    return rows


TIMER = """
import atexit, json, os, time
from bertsmith.train import loop
steps, renames, step, rename = [], [], loop.train_step, os.rename
def timed_step(*arguments, **options):
    began = time.perf_counter()
    result = step(*arguments, **options)
    steps.append((began, time.perf_counter()))
    return result
def timed_rename(source, target, **options):
    rename(source, target, **options)
    renames.append((str(target), time.perf_counter()))
loop.train_step, os.rename = timed_step, timed_rename
def write():
    with open({path!r}, "w") as file:
        json.dump({{"steps": steps, "renames": renames}}, file)
atexit.register(write)
"""


def measure_cost(world: World, scratch: Path, *, quick: bool) -> dict[str, Any]:
    """BERT-base in small steps, saved at every third: gaps between steps, and steps beside a save.

    What a save takes from the run is the gap that it makes between two steps, and by how much the
    steps beside its background part are slower than the others.
    """
    words = world.prepare(scratch / "prepared", "--tokenizer", str(installed_minilm()))
    at = words.index("--vocab_size")
    del words[at : at + 2]
    world.zygote.run(words).must()
    every, steps = 4, 8 if quick else 20
    run = scratch / "run"
    argv = [
        *("pretrain", "--data", str(scratch / "prepared"), "--model", "bert-base"),
        *("--output", str(run), "--steps", str(steps), "--tokens_per_step", "512"),
        *("--packing.tokens_per_pack", "512", "--packing.max_sequence_tokens", "128"),
        *("--save.every_steps", str(every), "--eval.every_steps", "1000", "--eval.max_tokens"),
        *("512", "--precision", "fp32", "--device", "cpu"),
    ]
    noted = scratch / "times.json"
    threads = str(os.cpu_count())
    started = world.zygote.start(
        argv, before=TIMER.format(path=str(noted)), environment={"OMP_NUM_THREADS": threads}
    )
    started.end(within_seconds=PATIENCE_SECONDS).must()
    times = json.loads(noted.read_text())
    return cost_of(times, run, every=every) | {"verify_seconds": verify_seconds(run)}


def cost_of(times: dict[str, Any], run: Path, *, every: int) -> dict[str, Any]:
    """Seconds that a save takes from the steps, from their times and those of the renames."""
    steps = times["steps"]
    safe_at = {Path(target).name: at for target, at in times["renames"]}
    plain: list[float] = []
    slower: list[float] = []
    gaps, blocking, background = [], [], []
    for number, ((began, ended), (then, _)) in enumerate(pairwise(steps), 1):
        if number % every:
            gaps.append(then - ended)
            last_save = number // every * every
            is_beside = last_save and began < safe_at[f"step-{last_save}"]
            (slower if is_beside else plain).append(ended - began)
        else:
            blocking.append(then - ended)
            background.append(safe_at[f"step-{number}"] - ended)
            plain.append(ended - began)
    step, saves = statistics.median(plain[1:]), len(blocking)
    extra = sum(seconds - step for seconds in slower) / saves
    block = statistics.median(blocking) - statistics.median(gaps)
    last = run / "checkpoints" / f"step-{checkpoints_of(run)[-1]}"
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in last.iterdir()),
        "step_seconds": step,
        "saves": saves,
        "blocking_seconds": block,
        "background_seconds": statistics.median(background),
        "slower_steps_seconds": extra,
        "share_every_100_steps_of_512_tokens": (block + extra) / (100 * step),
        "share_every_100_steps_of_8192_tokens": (block + extra) / (100 * 16 * step),
        "step_seconds_for_one_percent": block + extra,
    }


def verify_seconds(run: Path) -> float:
    """Median of five: compare the newest checkpoint with its manifest, files in memory."""
    from bertsmith.checkpoint.folder import newest_checkpoint

    taken = []
    for _ in range(5):
        started = time.perf_counter()
        assert newest_checkpoint(run / "checkpoints", print) is not None
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def markdown(content: dict[str, Any]) -> str:
    """The tables."""
    facts = content["machine"]
    lines = [f"# Faults: {facts['cores']}-core {facts['cpu']}, {content['date']}", ""]
    lines += [f"torch {facts['torch']}, Python {facts['python']}. `docs/reliability.md`.", ""]
    lines += ["| fault | tried | survived to the bit | seconds |", "| --- | --- | --- | --- |"]
    for part in content["parts"].values():
        for found in part.get("rows", []):
            lines.append(
                f"| {found['fault']} | {found['tried']} | **{found['survived']}** | "
                f"{found['seconds']:,.0f} |"
            )
    wrong = [
        f"- {found['fault']}: {said}"
        for part in content["parts"].values()
        for found in part.get("rows", [])
        for said in found["wrong"]
    ]
    lines += ["", "What went wrong:", "", *wrong] if wrong else []
    cost = content["parts"].get("cost", {}).get("cost")
    if cost:
        lines += cost_lines(cost)
    return "\n".join([*lines, ""])


def cost_lines(cost: dict[str, Any]) -> list[str]:
    """What a save and a verification of BERT-base cost."""
    extra = cost["blocking_seconds"] + cost["slower_steps_seconds"]
    return [
        "",
        f"## Cost of a checkpoint of BERT-base ({cost['checkpoint_bytes'] / 1e9:.2f} GB)",
        "",
        f"Steps of 512 tokens on all cores, {cost['step_seconds']:.2f} s each, "
        f"{cost['saves']} saves.",
        "",
        f"- a save stops the steps for {cost['blocking_seconds']:.2f} s (the copy of weights and "
        f"moments), and is safe {cost['background_seconds']:.1f} s after its step",
        f"- steps beside it take {cost['slower_steps_seconds']:.2f} s more, all together",
        f"- so a save costs {extra:.2f} s. Every 100 steps: "
        f"{cost['share_every_100_steps_of_512_tokens']:.2%} of steps of 512 tokens, and "
        f"**{cost['share_every_100_steps_of_8192_tokens']:.2%}** of steps of 8,192 tokens, the "
        "default, which take 16 times as long; target under 1 %",
        f"- on any machine that saves as fast: under 1 % while a step takes more than "
        f"{cost['step_seconds_for_one_percent']:.2f} s",
        f"- verifying it: **{cost['verify_seconds']:.2f} s**, target under 2 s",
    ]


def save(output: Path, name: str, part: dict[str, Any]) -> None:
    """Add a part to today's results; other parts of the day stay."""
    output.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d")
    path = output / f"faults_{os.cpu_count()}-core-cpu_{date}.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    content = {"date": date, "machine": machine(), "parts": parts | {name: part}}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(content), encoding="utf-8")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    attacks = {
        "kills": measure_kills,
        "calls": measure_calls,
        "processes": measure_processes,
        "damage": measure_damage,
        "disk": measure_disk,
    }
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "runs").mkdir()
        (scratch / "world").mkdir()
        zygote = Zygote(scratch / "runs")
        try:
            world = World(scratch / "world", zygote)
            for part in args.part:
                print(part, file=sys.stderr, flush=True)
                (scratch / part).mkdir()
                if part == "cost":
                    found = measure_cost(world, scratch / part, quick=args.quick)
                    save(args.output, part, {"cost": found})
                else:
                    rows = attacks[part](world, scratch / part, quick=args.quick)
                    save(args.output, part, {"rows": [asdict(found) for found in rows]})
                shutil.rmtree(scratch / part)
        finally:
            zygote.close()


if __name__ == "__main__":
    main()
