"""Memory of a worker process."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")


def heap_bytes() -> int:
    """Private data of this process as the kernel counts it against RLIMIT_DATA, 0 where there is no /proc."""
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def give_back_memory() -> None:
    """Return freed memory to the system: OCR leaves 300 MB of it behind on glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
