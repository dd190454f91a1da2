"""Lets the allocator keep what training frees: fresh pages cost far more than pages in use.

glibc gives blocks of more than 32 MiB back to the system at once, and the next step pays for
every page again (4 to 6 GB/s, against 45 to 73 for memory in use: docs/experiments.md).
"""

import ctypes
import platform
from contextlib import suppress

from bertsmith.memory.here import has_own_limit

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1


def reuse_freed_memory() -> bool:
    """Tell glibc to keep freed blocks for reuse; True where that was possible.

    Process-wide and for good, so it is for the start of a training run. Elsewhere (macOS, musl,
    jemalloc preloaded) nothing is done: those allocators have rules of their own. Nor is it where
    the process has a limit of its own (`ulimit -v`, `-d`): what is kept, and the spare room that
    every thread's heap grows by, would be taken from it.
    """
    if platform.libc_ver()[0] != "glibc" or has_own_limit():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = (
        (_M_MMAP_MAX, 0),  # large blocks come from the heap (its threshold cannot be set so high)
        (_M_TRIM_THRESHOLD, _NEVER),  # and the heap's top is not given back
        (_M_TOP_PAD, 64 << 20),  # and grows in few steps
    )
    done = [mallopt(what, value) for what, value in settings]  # all of them, even after a refusal
    return all(done)


def trim() -> None:
    """Give freed memory back to the system after all: what failed to fit may have torn it up."""
    if platform.libc_ver()[0] == "glibc":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
