"""Who is cut off ends its launcher; who reaches the meeting point leaves it alone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
print("lived on")
"""

RANK = """
import socket, sys
sys.path.insert(0, {source!r})
from bertsmith.parallel import partition
partition.PATIENCE_SECONDS = 0.3

def connect(host, port, seconds):
    {what}

print("killed:", partition.end_cut_off_launcher("node-a", 29400, connect=connect), flush=True)
"""


def outcome(what: str) -> tuple[list[str], int]:
    """What a launcher and its rank say when trying to connect does `what`; the launcher's code."""
    rank = textwrap.dedent(RANK).format(source=str(SOURCE), what=what)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, rank],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout.splitlines(), done.returncode


@pytest.mark.parametrize(
    "what",
    [
        "return",
        "raise ConnectionRefusedError",  # the machine answers, so the launcher hears it too
    ],
)
def test_a_launcher_that_is_not_cut_off_lives_on(what: str) -> None:
    assert outcome(what) == (["killed: False", "lived on"], 0)


@pytest.mark.parametrize(
    "what", ["raise TimeoutError", "raise OSError('no route')", "raise socket.gaierror"]
)
def test_a_cut_off_launcher_is_killed(what: str) -> None:
    said, code = outcome(what)
    assert code == -9
    assert said == ["killed: True"]


def test_a_network_that_comes_back_in_time_is_no_cut() -> None:
    what = """connect.tries = getattr(connect, "tries", 0) + 1
    if connect.tries < 2:
        raise TimeoutError"""
    assert outcome(what) == (["killed: False", "lived on"], 0)
