"""Freed memory stays with the process; in a process of its own, as the setting is for good."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, numpy as np
from bertsmith.train.memory_reuse import reuse_freed_memory
assert reuse_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    np.ones(100 << 17)  # 100 MiB, beyond what glibc keeps by itself
before = faults()
for _ in range(5):
    np.ones(100 << 17)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_large_block_is_not_paid_for_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 5 * 100 * 256 // 10  # fresh pages: 256 faults a MiB


HUGE = """
import torch
from bertsmith.train.precision import choose_compute
choose_compute("fp32", "cpu")
kept = torch.ones(16 << 20)  # 64 MiB
print(next(line for line in open("/proc/self/smaps_rollup") if "AnonHugePages" in line).split()[1])
"""
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no pages of 2 MiB here"
)
@pytest.mark.parametrize("users_choice", [None, "0"])
def test_large_tensors_lie_in_huge_pages_unless_the_user_says_no(users_choice: str | None) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    if users_choice is not None:
        environ["THP_MEM_ALLOC_ENABLE"] = users_choice
        if "[always]" in PAGES.read_text():
            pytest.skip("the system gives them to all")
    done = subprocess.run(
        [sys.executable, "-c", HUGE], capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == (users_choice is None)
