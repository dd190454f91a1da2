"""What this machine offers: read from files made up for the test."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.errors import UserError
from bertsmith.memory import here
from bertsmith.memory.devices import DEVICES, named_device

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_smallest_of_the_limits_counts_and_is_named(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
        },
    )
    limit = here.cpu_limit(root)
    assert limit.num_bytes == 3 * GIB  # 4, of which 1 is in use and no cache
    assert "memory.max of 4.0 GiB" in limit.why


def test_an_old_cgroup_is_read_too_and_its_no_limit_is_none(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2 * GIB}\n",
    }
    assert here.cpu_limit(write(tmp_path, files)).num_bytes == 2 * GIB
    write(tmp_path, {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n"})
    assert here.cpu_limit(tmp_path).num_bytes == 8 * GIB


def test_others_who_hold_memory_are_named(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/7/comm": "python\n",
            "proc/7/status": "Name:\tpython\nVmRSS:\t 2097152 kB\n",
            "proc/8/status": "Name:\tsmall\nVmRSS:\t 10 kB\n",
        },
    )
    assert here.largest_processes(root) == [here.Taken(who="python (process 7)", num_bytes=2 * GIB)]


def test_nvidia_smi_is_asked_and_its_absence_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 1000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (gpu,) = here.gpus_here()
    assert (gpu.name, gpu.total_bytes >> 20, gpu.used_bytes >> 20) == ("NVIDIA H200", 143771, 1000)
    monkeypatch.setenv("PATH", "")
    assert here.gpus_here() == []


def test_devices_have_names_or_sizes() -> None:
    assert named_device("A100-80") is DEVICES["a100-80"]
    assert named_device("16GiB").memory_bytes == 16 * GIB
    assert named_device("1.5 gb").memory_bytes == 1_500_000_000
    assert not DEVICES["t4"].computes("bf16")
    with pytest.raises(UserError, match=r"did you mean h100\? known are h200, .*such as 16GiB"):
        named_device("h10")
    with pytest.raises(UserError, match="known are"):
        named_device("0GiB")


def test_a_limit_of_the_process_counts_less_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n",
            "proc/self/status": "VmSize:\t 3145728 kB\nVmData:\t 1048576 kB\nThreads:\t1\n",
        },
    )
    limits = {resource.RLIMIT_AS: -1, resource.RLIMIT_DATA: -1}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    assert not here.has_own_limit()
    assert here.cpu_room(root).num_bytes == 8 * GIB
    assert not here.cpu_room(root).is_certain
    limits[resource.RLIMIT_AS] = 5 * GIB
    assert here.cpu_room(root).num_bytes == 2 * GIB
    limits[resource.RLIMIT_DATA] = 2 * GIB
    room = here.cpu_room(root)
    assert (room.num_bytes, room.is_certain, room.is_of_cgroup) == (GIB, True, False)
    assert room.why == "RLIMIT_DATA (ulimit -d) of 2.00 GiB"
    assert here.has_own_limit()


def test_a_cgroup_refuses_before_it_kills(tmp_path: Path) -> None:
    """In a process of its own, whose limit is its cgroup's: 64 MiB more, and no more."""
    program = (
        "import resource; from bertsmith.memory.here import Limit, fenced\n"
        "before = resource.getrlimit(resource.RLIMIT_DATA)\n"
        "for of_cgroup in (False, True):\n"
        "    with fenced(Limit(num_bytes=64 << 20, why='', is_of_cgroup=of_cgroup)):\n"
        "        for size in (32, 128):\n"
        "            try:\n"
        "                bytearray(size << 20); print('fits')\n"
        "            except MemoryError:\n"
        "                print('refused')\n"
        "    assert resource.getrlimit(resource.RLIMIT_DATA) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["fits", "fits", "fits", "refused"]
