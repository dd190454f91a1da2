"""What a rank leaves for the launcher that started it: its exit code, and what it has not told.

torchrun's agent gives no exit codes once a signal has ended it, and a mistake found before the
ranks have met is found by each of them: the launcher reads them all, and says it once. No torch
here.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

AGAIN = "again"
"""Name of the file in which a rank asks for a new start."""

FOLDER = "BERTSMITH_LAST_WORDS"
"""Environment variable that our launcher sets; torchrun and srun do not."""


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """How one rank ended."""

    code: int
    line: str | None
    """What the user has to be told; None if all has been said."""


def tell(line: str, *, code: int) -> None:
    """Tell the user what ends this process, or leave that to our launcher, if it has one."""
    if FOLDER in os.environ and "RANK" in os.environ:
        leave(code, line)
    else:
        print(line, file=sys.stderr)


def leave(code: int, line: str | None = None) -> None:
    """Write a rank's last word; a process that our launcher has not started leaves none."""
    if FOLDER in os.environ and "RANK" in os.environ:
        file = Path(os.environ[FOLDER]) / f"{os.environ['RANK']}.json"
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(asdict(LastWord(code=code, line=line))), encoding="utf-8")
        beside.replace(file)


def ask_again(options: list[str]) -> None:
    """Ask our launcher, if it has started this process, to start the ranks once more.

    Args:
        options: Of the command line, which then come after the user's own.
    """
    if FOLDER in os.environ and "RANK" in os.environ:
        (Path(os.environ[FOLDER]) / AGAIN).write_text(json.dumps(options), encoding="utf-8")


def asked_again(folder: Path) -> list[str] | None:
    """The options that a rank asked for a new start with, if one did."""
    file = folder / AGAIN
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def read(folder: Path) -> dict[int, LastWord]:
    """The last word of each rank that has left one, in the order of ranks."""
    found = {int(file.stem): file for file in folder.glob("*.json")}
    return {
        rank: LastWord(**json.loads(found[rank].read_text(encoding="utf-8")))
        for rank in sorted(found)
    }
