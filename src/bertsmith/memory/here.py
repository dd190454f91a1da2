"""This machine's memory: what a run may use of it, and who else uses it. Asked without torch."""

import csv
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number about as large where there is no limit."""

NVIDIA_SMI_SECONDS = 5.0

WORTH_A_NAME_BYTES = 256 * MIB
"""A process that holds as much is named."""

ADDRESSES_BESIDE_BYTES = 384 * MIB
"""Addresses that a process with torch reserves beyond the memory it holds: libraries, mostly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """So much may be used, and why."""

    num_bytes: int
    why: str
    is_certain: bool = False
    """Whether more is refused, or ends the process: not so of memory that others may give back."""

    is_of_cgroup: bool = False
    """Whether the system kills who takes more, instead of refusing it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Memory that another process holds."""

    who: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What nvidia-smi says of a GPU."""

    name: str
    total_bytes: int
    used_bytes: int


def cpu_limit(root: Path = Path("/")) -> Limit:
    """What a run that is yet to start may use.

    It is the smallest of what the system has available, what the cgroups allow, and `ulimit -v` and
    `-d`.

    Args:
        root: Under which /proc and /sys are; another one in tests.
    """
    beside = {"VmSize": ADDRESSES_BESIDE_BYTES, "VmData": 0}
    return _smallest([*_available(root), *_cgroup_limits(root), *_own_limits(beside)])


def cpu_room(root: Path = Path("/")) -> Limit:
    """What this process may take besides what it has, by the same limits."""
    status = _kilobytes(root / "proc/self/status")
    return _smallest([*_available(root), *_cgroup_limits(root), *_own_limits(status)])


def resident_bytes(root: Path = Path("/")) -> int | None:
    """What this process has of the machine's memory; None where the system does not say."""
    return _kilobytes(root / "proc/self/status").get("VmRSS")


def has_own_limit() -> bool:
    """Whether `ulimit -v` or `-d` bounds this process."""
    return bool(_own_limits({}))


def _smallest(limits: list[Limit]) -> Limit:
    if not limits:  # no Linux
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        limits = [Limit(num_bytes=pages * size, why="the machine's memory")]
    return min(limits, key=lambda limit: limit.num_bytes)


def _own_limits(taken_bytes: Mapping[str, int]) -> list[Limit]:
    """Of this process alone, less what is taken of them, by the name it has in /proc."""
    limits = []
    for name, option, number, taken in (
        ("RLIMIT_AS", "ulimit -v", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", "ulimit -d", resource.RLIMIT_DATA, "VmData"),
    ):
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            free = max(soft - taken_bytes.get(taken, 0), 0)
            why = f"{name} ({option}) of {soft / 2**30:.2f} GiB"
            limits.append(Limit(num_bytes=free, why=why, is_certain=True))
    return limits


@contextmanager
def fenced(room: Limit) -> Iterator[Callable[[], None]]:
    """Within the block too much memory is refused before a cgroup would kill the process for it.

    What is refused is an error that training meets with smaller passes. A process that has a limit
    of its own already, or no cgroup, is left as it is.

    Args:
        room: What this process may take besides what it has.

    Yields:
        A function that moves the fence to where the cgroup's limit is now: addresses whose memory
        was given back count for the fence, and not for the cgroup.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    data = _kilobytes(Path("/proc/self/status")).get("VmData")
    most = None if data is None else data + room.num_bytes
    if most is None or not room.is_of_cgroup or most >= (soft if soft >= 0 else _NO_LIMIT):
        yield lambda: None
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def move() -> None:
        data = _kilobytes(Path("/proc/self/status")).get("VmData", 0)
        now = _smallest([*_available(Path("/")), *_cgroup_limits(Path("/"))])
        resource.setrlimit(resource.RLIMIT_DATA, (data + now.num_bytes, hard))

    try:
        yield move
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _available(root: Path) -> list[Limit]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return [Limit(num_bytes=int(line.split()[1]) * 1024, why="MemAvailable")]
    return []


def _cgroup_limits(root: Path) -> list[Limit]:
    """Of this process's groups and all above them; a limit less what is in use and not a cache."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, most, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            limit, current = _number(folder / most), _number(folder / used) or 0
            if limit is not None and limit < _NO_LIMIT:
                in_use = max(current - _cache_bytes(folder), 0)
                why = f"cgroup {most} of {limit / 2**30:.1f} GiB"
                if in_use >= MIB:
                    why += f", {in_use / 2**30:.1f} GiB of it in use"
                free = max(limit - in_use, 0)
                limits.append(Limit(num_bytes=free, why=why, is_certain=True, is_of_cgroup=True))
            if folder == base:
                break
    return limits


def _cache_bytes(folder: Path) -> int:
    """File pages of a group, which the system takes back when memory is wanted."""
    wanted = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    found = dict(
        line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if " " in line
    )
    totals = [name for name in wanted if name.startswith("total_") and name in found]
    return sum(int(found[name]) for name in totals or [n for n in wanted if n in found])


def largest_processes(root: Path = Path("/"), *, at_most: int = 3) -> list[Taken]:
    """The other processes of this machine with most resident memory, 256 MiB or more each."""
    found = []
    for folder in (root / "proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        num_bytes = _kilobytes(folder / "status").get("VmRSS", 0)
        if num_bytes >= WORTH_A_NAME_BYTES:
            who = f"{_text(folder / 'comm').strip() or '?'} (process {folder.name})"
            found.append(Taken(who=who, num_bytes=num_bytes))
    return sorted(found, key=lambda taken: -taken.num_bytes)[:at_most]


def gpus_here() -> list[Gpu]:
    """This machine's GPUs; none where there is no nvidia-smi or it does not answer."""
    rows = _nvidia_smi("--query-gpu=name,memory.total,memory.used")
    return [
        Gpu(name=name, total_bytes=int(total) * MIB, used_bytes=int(used) * MIB)
        for name, total, used in (row for row in rows if len(row) == 3)
    ]


def gpu_processes() -> list[Taken]:
    """The other processes that hold memory of a GPU."""
    rows = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory")
    return [
        Taken(who=f"{name} (process {pid})", num_bytes=int(used) * MIB)
        for pid, name, used in (row for row in rows if len(row) == 3 and row[2].isdecimal())
        if pid != str(os.getpid())
    ]


def cpu_computes_bf16() -> bool:
    """Whether the CPU has bf16 dot products (AVX512-BF16, AMX, or Arm's bf16)."""
    flags = set(_text(Path("/proc/cpuinfo")).split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _nvidia_smi(query: str) -> Sequence[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode:
        return []
    return list(csv.reader(answer.stdout.splitlines(), skipinitialspace=True))


def _kilobytes(file: Path) -> dict[str, int]:
    """Sizes in a file of /proc, in bytes, by name."""
    lines = (line.split() for line in _text(file).splitlines())
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in lines if len(w) == 3 and w[2] == "kB"}


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    """A file's content; nothing where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
