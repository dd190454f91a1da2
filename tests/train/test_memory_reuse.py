"""Freed memory stays with the process; in a process of its own, as the setting is for good."""

import platform
import subprocess
import sys

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
