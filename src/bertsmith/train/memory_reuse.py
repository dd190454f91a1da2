"""What the C allocator and oneDNN keep on a CPU: much where memory is plenty, little where not.

glibc gives blocks of more than 32 MiB back to the system at once, and the next step pays for
every page again (4 to 6 GB/s, against 45 to 73 for memory in use: docs/experiments.md). So a run
keeps them. Under a limit that counts addresses (`ulimit -v`, `-d`) what a heap keeps is lost to
those who map memory by themselves, as oneDNN does for the code of each product it compiles. A
product that could not be compiled is worse than a tensor that found no room: oneDNN remembers the
failure, and compiles no other in that thread.
"""

import ctypes
import os
import platform
from contextlib import suppress

from bertsmith.memory.here import has_own_limit

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_NEVER = -1

LARGE_BLOCK_BYTES = 1 << 20
"""Where memory is short, blocks of this size are mapped one by one and given back."""

COMPILED_PRODUCTS, COMPILED_PRODUCTS_UNDER_A_LIMIT = 256, 32
"""Products that oneDNN keeps compiled, 0.3 to 0.6 MB each; those of one size of pack are about 25.
One that is compiled anew costs 0.2 to 0.4 ms. oneDNN's own bound is 1,024, up to half a GB."""


def reuse_freed_memory() -> bool:
    """Tell glibc to keep freed blocks for reuse; True where that was possible.

    Process-wide and for good, so it is for the start of a training run. Elsewhere (macOS, musl,
    jemalloc preloaded) nothing is done: those allocators have rules of their own. Nor are blocks
    kept where the process has a limit of its own.
    """
    if has_own_limit():
        _map_large_blocks()
        return False
    return _mallopt(
        (_M_MMAP_MAX, 0),  # large blocks come from the heap (its threshold cannot be set so high)
        (_M_TRIM_THRESHOLD, _NEVER),  # and the heap's top is not given back
        (_M_TOP_PAD, 64 << 20),  # and grows in few steps
    )


def bound_compiled_products() -> None:
    """Tell oneDNN how many to keep, unless the user did; before the first product of a process."""
    kept = COMPILED_PRODUCTS_UNDER_A_LIMIT if has_own_limit() else COMPILED_PRODUCTS
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(kept))


def use_huge_pages() -> None:
    """Have torch ask for pages of 2 MiB, unless the user decided; before a process's first tensor.

    A step walks through all weights, moments and gradients, and finds their addresses faster: it
    takes 3 to 6 % less time (docs/experiments.md). Linux alone has such pages, and gives them where
    it can. Not where the process has a limit of its own: a tensor then begins at a whole page, and
    what lies before it is lost.
    """
    if not has_own_limit():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def trim() -> None:
    """Give freed memory back to the system after all: what failed to fit may have torn it up.

    From here on large blocks are given back when they are freed.
    """
    _map_large_blocks()
    if platform.libc_ver()[0] == "glibc":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _map_large_blocks() -> None:
    """Each by itself, so that it goes when it is freed."""
    _mallopt((_M_MMAP_MAX, 65_536), (_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES))


def _mallopt(*settings: tuple[int, int]) -> bool:
    """Set glibc's options; False where that is not possible."""
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    done = [mallopt(what, value) for what, value in settings]  # all of them, even after a refusal
    return all(done)
