"""The memory allocator of this process, and how a command keeps what it frees for its next step.

glibc takes a large buffer from the system and gives it back when it is freed: a network that makes the same buffers
in each step pays a page fault for every 4 KB of them, again and again.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
# From glibc's malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD. `mallopt` takes an int, the variables more.
_OPTIONS = {-3: 1 << 30, -1: (1 << 31) - 1, -2: 1 << 28}


def allocator() -> str:
    """What `malloc` is: "glibc", "jemalloc", …, or "system"; by the libraries loaded, as one comes by LD_PRELOAD."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "system"
    found = [name for name in ALLOCATORS if f"lib{name}" in maps]
    return found[0] if found else platform.libc_ver()[0] or "system"


def is_tuned() -> bool:
    """Whether the environment says what glibc's malloc is to keep."""
    return set(VARIABLES[:2]) <= set(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def keep_memory() -> bool:
    """Has glibc keep freed memory of this process, which a program of our own may ask for; else changes nothing.

    Returns:
        Whether it does. It does not where another allocator is in place, or the environment decides.
    """
    if allocator() != "glibc" or is_tuned():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not a system with a libc that is found so
        return False
    return all(mallopt(option, value) == 1 for option, value in _OPTIONS.items())
