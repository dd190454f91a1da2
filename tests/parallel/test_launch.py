"""What a launcher says and returns for the ways in which its ranks may end."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from bertsmith.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USER_ERROR
from bertsmith.parallel import last_word, launch
from bertsmith.parallel.last_word import LastWord

DONE, SAVED = LastWord(code=0, line=None), LastWord(code=EXIT_INTERRUPTED, line=None)
MISTAKE = LastWord(code=EXIT_USER_ERROR, line="bertsmith: error: wrong")
TOLD = LastWord(code=EXIT_USER_ERROR, line=None)


@pytest.mark.parametrize(
    ("failures", "words", "code", "line"),
    [
        ({}, {0: DONE, 1: DONE}, 0, None),
        ({1: -9, 0: -15}, {}, EXIT_FAULT, "rank 1 was ended by SIGKILL (out of memory?)"),
        ({0: -11, 1: -15}, {}, EXIT_FAULT, "rank 0 was ended by SIGSEGV"),
        ({1: -9, 0: 1}, {}, EXIT_FAULT, None),  # rank 0 has said who is missing
        ({1: 2, 0: -15}, {1: TOLD}, EXIT_USER_ERROR, None),
        ({1: 2, 0: -15}, {1: MISTAKE}, EXIT_USER_ERROR, "bertsmith: error: wrong"),
        ({0: 2, 1: 2}, {0: MISTAKE, 1: MISTAKE}, EXIT_USER_ERROR, "bertsmith: error: wrong"),
        ({0: EXIT_INTERRUPTED, 1: -15}, {0: SAVED}, EXIT_INTERRUPTED, None),
    ],
)
def test_an_end_that_nobody_asked_for(
    failures: Mapping[int, int], words: Mapping[int, LastWord], code: int, line: str | None
) -> None:
    found, said = launch.end_of_ranks(failures, words)
    assert found == code
    assert (said is None) == (line is None)
    assert line is None or (said is not None and said.endswith(line))


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ({0: SAVED, 1: SAVED}, EXIT_INTERRUPTED, None),
        ({0: DONE, 1: DONE}, 0, None),
        ({0: SAVED}, 128 + signal.SIGTERM, "SIGTERM before all ranks had saved"),  # 1 was killed
        ({}, 128 + signal.SIGTERM, "SIGTERM before all ranks had saved"),
        ({0: TOLD, 1: TOLD}, EXIT_USER_ERROR, None),
        ({1: MISTAKE}, EXIT_USER_ERROR, "bertsmith: error: wrong"),
    ],
)
def test_an_end_by_a_signal(words: Mapping[int, LastWord], code: int, line: str | None) -> None:
    found, said = launch.end_by_signal(signal.SIGTERM, words, processes=2)
    assert found == code
    assert (said is None) == (line is None)
    assert line is None or (said is not None and said.endswith(line))


def test_last_words_are_left_for_our_launcher_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    last_word.leave(0)
    last_word.tell("a mistake", code=EXIT_USER_ERROR)
    assert capsys.readouterr().err == "a mistake\n"
    monkeypatch.setenv(last_word.FOLDER, str(tmp_path))
    last_word.tell("a mistake", code=EXIT_USER_ERROR)
    monkeypatch.setenv("RANK", "12")
    last_word.leave(0)
    assert capsys.readouterr().err == ""
    assert last_word.read(tmp_path) == {
        3: LastWord(code=EXIT_USER_ERROR, line="a mistake"),
        12: DONE,
    }


RANKS = """
import os, sys, types
import bertsmith.parallel.launch as launch

if "RANK" not in os.environ:  # the launcher: its ranks run this text, not bertsmith
    real = launch.elastic_launch
    def instead(config, python):
        assert config.shutdown_timeout >= 100
        return lambda *words: real(config, python)(sys.argv[0], *words)
    launch.elastic_launch = instead
    from bertsmith.cli import run
    words = ["pretrain", "--data", "d", "--model", "m", "--output", "o"]
    sys.exit(run([*words, "--parallel.devices", "2", "--device", "cpu", *sys.argv[1:]]))

from bertsmith import cli
sys.modules["bertsmith.recipes.pretrain"] = types.SimpleNamespace(main=lambda config: work())
{work}
sys.exit(cli.run(sys.argv[3:]))
"""


def start(folder: Path, work: str, *words: str) -> subprocess.Popen[str]:
    """A launcher of two ranks whose recipe is `work`."""
    file = folder / "ranks.py"
    file.write_text(RANKS.replace("{work}", work))
    return subprocess.Popen(
        [sys.executable, str(file), *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    work = """
def work():
    import signal, time
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""
    launcher = start(tmp_path, work)
    _, said = launcher.communicate(timeout=60)
    assert said == "bertsmith: error: rank 1 was ended by SIGKILL (out of memory?)\n"
    assert launcher.returncode == EXIT_FAULT


def test_a_mistake_that_each_rank_finds_is_one_line(tmp_path: Path) -> None:
    work = """
def work():
    from bertsmith.errors import UserError
    raise UserError("wrong on rank " + os.environ["RANK"])
"""
    launcher = start(tmp_path, work)
    _, said = launcher.communicate(timeout=60)
    assert said.startswith("bertsmith: error: wrong on rank ")
    assert said.count("\n") == 1
    assert launcher.returncode == EXIT_USER_ERROR


def test_debug_reaches_the_ranks(tmp_path: Path) -> None:
    work = """
def work():
    from bertsmith.errors import UserError
    raise UserError("wrong")
"""
    launcher = start(tmp_path, work, "--debug")
    _, said = launcher.communicate(timeout=60)
    assert "Traceback" in said
    assert launcher.returncode == EXIT_FAULT


@pytest.mark.parametrize("saves", [True, False])
def test_interrupted_is_what_has_saved(saves: bool, tmp_path: Path) -> None:
    work = """
def work():
    import pathlib, signal, time
    from bertsmith.errors import EXIT_INTERRUPTED
    asked = []
    on_signal = (lambda number, frame: asked.append(number)) if {saves} else signal.SIG_DFL
    signal.signal(signal.SIGTERM, on_signal)
    pathlib.Path("ready" + os.environ["RANK"]).touch()
    while not asked:
        time.sleep(0.02)
    return EXIT_INTERRUPTED
"""
    launcher = start(tmp_path, work.replace("{saves}", str(saves)))
    until = time.monotonic() + 60.0
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == (EXIT_INTERRUPTED if saves else 128 + signal.SIGTERM)
    assert said == ("" if saves else "bertsmith: ended by SIGTERM before all ranks had saved\n")
