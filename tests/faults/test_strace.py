"""The same through the system's own calls, in whole processes: what the injector might not see.

Faults 1 and 7 of the list in `docs/reliability.md`; skipped where strace is not installed.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fault_harness.attacks import difference
from fault_harness.runs import (
    PATIENCE_SECONDS,
    checkpoints_of,
    environment_with,
    final_hashes,
    whole_checkpoints,
)
from fault_harness.world import World

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")


def run_under_strace(
    words: Sequence[str], *, inject: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`bertsmith WORDS`, with a fault in the system calls that touch a path, or in any."""
    only = ["-P", str(path)] if path else []
    return subprocess.run(
        [
            *("strace", "-f", "-qqq", "-o", "/dev/null", *only),
            *("-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}"),
            *(sys.executable, "-m", "bertsmith", *words),
        ],
        env=environment_with(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def test_the_system_kills_the_run_when_a_checkpoint_has_its_name(
    world: World, tmp_path: Path
) -> None:
    """Before the folder that holds it is flushed: the next start finds it, or starts anew."""
    run = tmp_path / "run"
    words = world.pretrain(run)
    dead = run_under_strace(words, inject="fsync:signal=KILL:when=1", path=run / "checkpoints")
    assert dead.returncode == -9, dead.stderr
    assert whole_checkpoints(run) == checkpoints_of(run)
    assert len(whole_checkpoints(run)) == 1
    world.zygote.run([*words, "--resume"]).must()
    assert difference(run, world.pretrained) is None


def test_flushes_that_the_system_fails_make_no_checkpoint(world: World, tmp_path: Path) -> None:
    """Each thread's eighth and later ones, so that no save can end: said, and never counted."""
    run = tmp_path / "run"
    words = world.pretrain(run)
    ended = run_under_strace(words, inject="fsync:error=EIO:when=8+")
    assert ended.returncode > 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "could not be written (Input/output error)" in ended.stderr
    assert checkpoints_of(run) == []
    world.zygote.run([*words, "--resume"]).must()
    assert final_hashes(run) == final_hashes(world.pretrained)
