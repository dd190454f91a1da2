"""Switch off what keeps runs safe, one by one, in a copy of the sources: a test has to fail.

    python tests/faults/mutations.py [NAME ...]

First the tests run on the sources as they are, and have to pass. A table of what failed goes to
standard output; the exit code is 1 if a mutation was not noticed, or fits the sources no longer.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 280


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A piece of a file, which is there once, and what stands there instead."""

    file: str
    """Below src/bertsmith."""

    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Something switched off, and the tests of which at least one has to fail."""

    name: str
    edits: Sequence[Edit]
    tests: Sequence[str]
    """Files or ids, below tests/faults."""


MUTATIONS = (
    Mutation(
        name="fsync",
        edits=[
            Edit(file="durable.py", old="        os.fsync(descriptor)\n", new="        pass\n"),
        ],
        tests=[
            "test_kills.py::test_after_a_power_cut_each_checkpoint_that_has_its_name_is_whole",
        ],
    ),
    Mutation(
        name="flush of the folder after a rename",
        edits=[Edit(file="durable.py", old="    flush(new.parent)\n", new="")],
        tests=[
            "test_kills.py::test_every_rename_is_followed_by_a_flush_of_its_folder_before_"
            "anything_is_deleted",
        ],
    ),
    Mutation(
        name="manifest check",
        edits=[
            Edit(
                file="checkpoint/manifest.py",
                old='                raise DamagedError(f"{name} {fault}")\n',
                new="                continue\n",
            ),
        ],
        tests=[
            "test_damage.py::test_150_flipped_bits_over_all_files_are_150_checkpoints_passed_over"
        ],
    ),
    Mutation(
        name="the manifest's check of itself",
        edits=[
            Edit(
                file="checkpoint/manifest.py",
                old="        if not is_whole:\n",
                new="        if False:\n",
            ),
        ],
        tests=[
            "test_damage.py::test_150_flipped_bits_over_all_files_are_150_checkpoints_passed_over"
        ],
    ),
    Mutation(
        name="fall-back to the checkpoint before",
        edits=[
            Edit(
                file="checkpoint/folder.py",
                old="        else:\n            return path\n",
                new="        else:\n            return path\n        break\n",
            ),
        ],
        tests=["test_damage.py::test_a_run_goes_back_to_the_one_before_and_ends_the_same"],
    ),
    Mutation(
        name="retention only after the commit",
        edits=[
            Edit(
                file="checkpoint/folder.py",
                old="    steps = [s for s in steps_in(folder) if s <= step]\n",
                new="    steps = sorted({*(s for s in steps_in(folder) if s < step), step})\n",
            ),
            Edit(
                file="recipes/run_checkpoints.py",
                old="            path = write_checkpoint(\n",
                new="            retain(\n"
                "                self._folder,\n"
                "                step=state.step,\n"
                "                keep_last=self._config.keep_last,\n"
                "                keep_best=0,\n"
                "            )\n"
                "            path = write_checkpoint(\n",
            ),
        ],
        tests=["test_kills.py::test_one_checkpoint_is_always_whole_when_one_is_kept"],
    ),
    Mutation(
        name="rank agreement on signals",
        edits=[
            Edit(
                file="train/loop.py",
                old="        if is_asked:\n",
                new="        if self._interruption.is_requested:\n",
            ),
        ],
        tests=["test_signals.py::test_a_signal_to_any_one_rank_stops_all_at_the_same_step"],
    ),
    Mutation(
        name="the lock",
        edits=[
            Edit(
                file="report/run_lock.py",
                old="        _take(folder, holder, say, stale_seconds=stale_seconds)\n",
                new="",
            ),
        ],
        tests=[
            "test_changed.py::test_a_second_run_in_the_folder_is_refused_by_name_and_a_dead_ones_"
            "lock_is_taken_over",
        ],
    ),
    Mutation(
        name="metrics cut back to the checkpoint",
        edits=[
            Edit(
                file="report/metrics_log.py",
                old="        return step <= self.steps_done\n",
                new="        return True\n",
            ),
        ],
        tests=["test_positions.py::test_resumed_at_any_position_a_run_ends_with_the_same_bits"],
    ),
    Mutation(
        name="refusal of another config",
        edits=[
            Edit(file="recipes/resume.py", old="    if refused:\n", new="    if False:\n"),
        ],
        tests=[
            "test_changed.py::test_a_changed_setting_is_refused_with_both_values_and_taken_when_"
            "it_is_named",
        ],
    ),
    Mutation(
        name="moments in the checkpoint",
        edits=[
            Edit(
                file="checkpoint/folder.py",
                old="        fill(moment, values)\n",
                new="        fill(moment, values * 0.0)\n",
            ),
        ],
        tests=["test_positions.py::test_resumed_at_any_position_a_run_ends_with_the_same_bits"],
    ),
)


def mutate(sources: Path, edits: Sequence[Edit]) -> None:
    """Edit a copy of the package.

    Raises:
        ValueError: A piece is not there once.
    """
    for edit in edits:
        file = sources / "bertsmith" / edit.file
        text = file.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise ValueError(f"{edit.file} holds {text.count(edit.old)} times: {edit.old.strip()}")
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def failed_tests(sources: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests on some sources; the exit code, and the first line that tells of a failure."""
    program = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*program, *(f"tests/faults/{test}" for test in tests)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(sources)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, "it did not end"
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, told[0] if told else done.stdout.strip().splitlines()[-1]


def main() -> int:
    """Try each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    wanted = parser.parse_args().names or names
    chosen = [mutation for mutation in MUTATIONS if mutation.name in wanted]
    all_tests = sorted({test for mutation in chosen for test in mutation.tests})
    code, told = failed_tests(ROOT / "src", all_tests)
    if code:
        print(f"without any mutation: {told}", file=sys.stderr)
        return 1
    print("| switched off | noticed | by | seconds |\n| --- | --- | --- | --- |")
    unnoticed = 0
    for mutation in chosen:
        started_at_seconds = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            sources = Path(folder) / "src"
            shutil.copytree(ROOT / "src", sources)
            try:
                mutate(sources, mutation.edits)
            except ValueError as error:
                code, told = 0, str(error)
            else:
                code, told = failed_tests(sources, mutation.tests)
        seconds = time.monotonic() - started_at_seconds
        test = told.partition("::")[2].split(" - ")[0] if code == 1 and "::" in told else told
        print(f"| {mutation.name} | {'yes' if code == 1 else 'NO'} | {test} | {seconds:.0f} |")
        sys.stdout.flush()
        unnoticed += code != 1
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
