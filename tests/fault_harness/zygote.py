"""A process that has imported bertsmith, and forks for each run: milliseconds instead of seconds.

Each line of standard input is a JSON object: `argv` of bertsmith, the `environment`, the folder
`cwd` or none, Python to run `before`, and `stem`: output goes to STEM.out and STEM.err, and the
exit code, negative for a signal, to STEM.exit. The answer is a line with the process's id. At the
end of the input what still runs is killed.
"""

import faulthandler
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import bertsmith
from bertsmith import cli
from bertsmith.recipes import finetune_run, pretrain_run


def import_all() -> None:
    """Every module of the package, so that a fork has nothing left to import."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # loads half of torch the first time
    for module in pkgutil.walk_packages(bertsmith.__path__, "bertsmith."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def serve() -> int:
    """Fork for each request; in a fork the exit code of its run."""
    stems: dict[int, str] = {}
    print("ready", flush=True)
    rest = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            read = os.read(0, 1 << 20)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                process = os.fork()
                if not process:
                    return run(request)
                stems[process] = request["stem"]
                print(process, flush=True)
        while stems:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            write_exit(stems.pop(process), os.waitstatus_to_exitcode(status))
    for process in stems:
        os.kill(process, signal.SIGKILL)
    return 0


def write_exit(stem: str, code: int) -> None:
    """Whole or not at all."""
    Path(stem + ".exiting").write_text(str(code))
    Path(stem + ".exiting").replace(stem + ".exit")


def run(request: dict[str, Any]) -> int:
    """In the fork: the process as if it had been started so."""
    stem = request["stem"]
    for number, path in enumerate((os.devnull, f"{stem}.out", f"{stem}.err")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    if request["cwd"]:
        os.chdir(request["cwd"])
    faulthandler.enable()  # for a run that hangs, see `Started.end`
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["bertsmith", *request["argv"]]
    import sitecustomize  # type: ignore[import-not-found]

    sitecustomize.arm()
    stub_gemm_rate()
    exec(request["before"], {})
    return cli.run(request["argv"])


def stub_gemm_rate() -> None:
    """The machine's limit is only for show, and takes a third of a second to measure."""
    for recipe in (pretrain_run, finetune_run):
        setattr(recipe, "gemm_flop_per_second", lambda *arguments, **options: 1e9)  # noqa: B010


if __name__ == "__main__":
    import_all()
    sys.exit(serve())
