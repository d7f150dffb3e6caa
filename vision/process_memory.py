"""How much memory a process holds, and what the C library does with what was freed."""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1024**2
# Of oneDNN, and of torch's layer above it, which keeps primitives of its own.
_PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MAX_PRIMITIVES = 64


def heap_bytes() -> int | None:
    """Private data of this process as the kernel counts it against RLIMIT_DATA, None where it does not tell."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None


def keep_heap_small() -> None:
    """Let glibc hand large blocks back at once; its growing threshold would keep them (OCR peak: 510 -> 340 MB)."""
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 * _MIB)
        mallopt(_M_TRIM_THRESHOLD, 32 * _MIB)


def keep_freed_memory() -> None:
    """Let tensors of some MB be allocated again without page faults.

    A step of 2,048 tokens of SmolLM2 took 0.72 s instead of 0.81 (2 cores of an EPYC 9005).
    """
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        # More than 32 MiB glibc does not take.
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
        mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
        mallopt(_M_TOP_PAD, 64 * _MIB)


def bound_primitive_caches() -> None:
    """Keep what is compiled for 64 shapes, not 1,024 in two caches: products in bfloat16 hold up to 1 MB for each.

    Both are read at the first product of the process. Who has set the variables is not overruled.
    """
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(_MAX_PRIMITIVES))


def give_back_memory() -> None:
    """Return freed memory to the system: OCR leaves 300 MB of it behind on glibc."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's allocators raise RuntimeError, of a kind of its own on a GPU alone."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "alloc" in str(error))


@functools.cache
def _c_function(name: str) -> Callable[..., int] | None:
    """A function of the C library, None where it has no such."""
    return getattr(ctypes.CDLL(None), name, None)
