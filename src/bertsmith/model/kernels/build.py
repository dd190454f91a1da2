"""Compiles the C kernels for this CPU on first use, and loads them.

No compiler, or BERTSMITH_KERNELS=off: `load` answers None with a reason in `status`, and every
caller has a body in plain torch. A build is named by the hash of sources, flags, compiler and CPU,
and is renamed into place, so that processes may race and an update never meets an old build.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import torch

Storage = Literal["fp32", "bf16"]

SOURCES = ("rows.c", "attention.c", "loss.c", "optim.c")
HEADERS = ("common.h", "tile.h")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
SECONDS_TO_COMPILE = 120


class _UnavailableError(Exception):
    """Why there are no kernels here, in a few words."""


@functools.cache
def load(storage: Storage) -> ctypes.CDLL | None:
    """The kernels for one storage type, compiled if this machine has not done so yet."""
    try:
        return _open(storage)
    except _UnavailableError:
        return None


def load_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for tensors of a type; None for a type they do not know, too."""
    match dtype:
        case torch.float32:
            return load("fp32")
        case torch.bfloat16:
            return load("bf16")
        case _:
            return None


def status() -> str:
    """One line for logs: whether the compiled kernels are in use, or why not."""
    try:
        _open("bf16")
    except _UnavailableError as reason:
        return f"CPU kernels: plain torch ({reason}); training is slower, results are the same"
    return "CPU kernels: compiled for this machine"


@functools.cache
def _open(storage: Storage) -> ctypes.CDLL:
    if os.environ.get("BERTSMITH_KERNELS", "on").lower() in ("off", "0", "no"):
        raise _UnavailableError("switched off by BERTSMITH_KERNELS")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise _UnavailableError("no C compiler found")
    torch.get_num_threads()  # torch's OpenMP library is loaded, and ours binds to the same one
    built = _built(compiler, storage)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise _UnavailableError(f"{built.name} does not load: {error}") from error


def _built(compiler: str, storage: Storage) -> Path:
    """The shared library of these sources, from the cache or fresh."""
    flags = [*FLAGS, *_machine_flags(), *(["-DSTORE_BF16"] if storage == "bf16" else [])]
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=12)
    for part in (*flags, _compiler_version(compiler), _cpu()):
        digest.update(part.encode() + b"\0")
    for name in (*HEADERS, *SOURCES):
        digest.update((here / name).read_bytes() + b"\0")
    try:
        folder = _cache_folder()
        target = folder / f"kernels-{storage}-{digest.hexdigest()}.so"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            fresh = Path(scratch) / target.name
            _compile([compiler, *flags, *(str(here / s) for s in SOURCES), "-o", str(fresh), "-lm"])
            fresh.replace(target)
    except OSError as error:
        raise _UnavailableError(f"cannot write the kernel cache: {error}") from error
    return target


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _UnavailableError(f"the C compiler did not run: {error}") from error
    if result.returncode:
        words = (result.stderr.strip() or "no message").splitlines()[0]
        raise _UnavailableError(f"the C compiler refused: {words}")


def _machine_flags() -> list[str]:
    if platform.machine().lower() in ("x86_64", "amd64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def _compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _UnavailableError(f"the C compiler did not run: {error}") from error
    return answer.stdout


def _cpu() -> str:
    """What -march=native would look at: the CPU's name and abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_folder() -> Path:
    """The user's cache, else a private temporary folder; made if missing, others kept out."""
    base = os.environ.get("XDG_CACHE_HOME")
    places = [Path(base) if base else Path.home() / ".cache"]
    owner = os.getuid() if hasattr(os, "getuid") else 0
    places.append(Path(tempfile.gettempdir()) / f"bertsmith-{owner}")
    problem: OSError | None = None
    for place in places:
        folder = place / "bertsmith"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == owner and os.access(folder, os.W_OK):
                return folder
            problem = PermissionError(f"{folder} belongs to somebody else")
        except OSError as error:
            problem = error
    assert problem is not None
    raise problem
