"""A run with three fifths of the memory that it would take learns the same, and by itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import resource, sys
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from bertsmith.cli import run
code = run(sys.argv[2:])
lines = open("/proc/self/status").read().splitlines()
peak = next(line for line in lines if line.startswith("VmData:"))  # a run keeps what it frees
print("VmData", int(peak.split()[1]) * 1024)
sys.exit(code)
"""
"""A command line with at most so many bytes of data; tells how many it had."""

SHAPE = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
}
"""Small, so that the activations of a large pack are most of what it takes."""


def pretrained(
    world: Path,
    name: str,
    *,
    limit_bytes: int,
    tokens: int = 16384,
    group: Path | None = None,
) -> tuple[dict[str, Any], str, int]:
    """Summary, log and peak of data of two steps with a pack each.

    The limit is one of data; the group is a cgroup to run in, with a limit of its own.
    """
    shape, output = world / "small_memory.json", world / name
    shape.write_text(json.dumps(SHAPE))
    options = (
        *("pretrain", "--data", str(world / "prepared"), "--model", str(shape)),
        *("--output", str(output), "--steps", "2", "--tokens_per_step", str(tokens)),
        *("--packing.tokens_per_pack", str(tokens), "--packing.max_sequence_tokens", "64"),
        *("--device", "cpu", "--precision", "fp32", "--eval.max_tokens", "500"),
    )
    joins = [] if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', ""]
    done = subprocess.run(
        [*joins, sys.executable, "-c", PROGRAM, str(limit_bytes), *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    peak = int(done.stdout.split("VmData")[1])
    return summary, done.stdout + done.stderr, peak


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA binds on Linux")
def test_three_fifths_of_the_natural_peak_are_enough(prepared: Path) -> None:
    natural, _, peak = pretrained(prepared, "natural", limit_bytes=0)
    limited, log, _ = pretrained(prepared, "limited", limit_bytes=peak * 6 // 10)
    assert "RLIMIT_DATA (ulimit -d)" in log
    assert "passes of at most" in log
    assert limited["status"] == "completed"
    assert limited["train_loss"] == pytest.approx(natural["train_loss"], rel=1e-6)
    assert limited["valid_loss"] == pytest.approx(natural["valid_loss"], rel=1e-6)
    assert limited["planned_peak_bytes"] < natural["planned_peak_bytes"]
    # The plan is held to bounds by the grid, in bytes of tensors. Of resident memory none is
    # promised: what the heap keeps goes by how threads meet, 0.89 to 1.39 GB here as other
    # processes take the cores. It is of the same measure, though.
    assert 0.5 < natural["planned_peak_bytes"] / natural["peak_memory_bytes"] < 1.5


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """A cgroup of our own, and the file that says how much it may use."""
    name = f"bertsmith-test-{os.getpid()}"
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = base / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                yield folder, folder / limit
                return
        finally:
            folder.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here")


@pytest.mark.slow
@pytest.mark.skipif("BERTSMITH_TEST_CGROUP" not in os.environ, reason="changes the system's groups")
def test_a_cgroup_with_three_fifths_of_the_natural_peak_is_enough(
    prepared: Path, group: tuple[Path, Path]
) -> None:
    """The system kills who takes more than a cgroup allows, so nothing may ever ask for it."""
    folder, limit = group
    natural, _, _ = pretrained(prepared, "free", limit_bytes=0)
    # Of what is planned: the resident peak goes by how threads meet, 0.9 to 1.7 GiB here.
    most = natural["planned_peak_bytes"] * 6 // 10
    limit.write_text(str(most))
    limited, log, _ = pretrained(prepared, "grouped", limit_bytes=0, group=folder)
    assert f"cgroup {limit.name} of {most / 2**30:.1f} GiB" in log
    assert "passes of at most" in log
    assert limited["status"] == "completed"
    assert limited["train_loss"] == pytest.approx(natural["train_loss"], rel=1e-6)
    assert limited["valid_loss"] == pytest.approx(natural["valid_loss"], rel=1e-6)
