"""The threads that PyTorch's own operations run on, for compiled functions."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding
from numba.core import config, types
from numba.extending import register_jitable

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")


def _functions(*names: str) -> list[Any]:
    """Of the OpenMP that PyTorch is linked with, which a process may have several of. Raises `ImportError`."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return [getattr(library, name) for name in names]
    except (OSError, AttributeError):
        raise ImportError("PyTorch's threads are not those of OpenMP as GCC has it") from None


_parallel, *_called = _functions("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_parallel.restype = None
# Names of our own: the process may have other functions of these names.
_NAMES = ("mmserve_barrier", "mmserve_thread_number", "mmserve_thread_count")
for _name, _function in zip(_NAMES, _called, strict=True):
    binding.add_symbol(_name, ctypes.cast(_function, ctypes.c_void_p).value)
_barrier = types.ExternalFunction(_NAMES[0], types.void())
_thread_number = types.ExternalFunction(_NAMES[1], types.int32())
_thread_count = types.ExternalFunction(_NAMES[2], types.int32())


@register_jitable  # type: ignore[untyped-decorator]
def barrier() -> None:
    """All threads of a parallel region wait for each other."""
    _barrier()


@register_jitable  # type: ignore[untyped-decorator]
def thread_number() -> int:
    """Which of the threads runs this; 0 outside a parallel region."""
    return int(_thread_number())


@register_jitable  # type: ignore[untyped-decorator]
def share_of(count: int) -> tuple[int, int]:
    """The part of `count` that is this thread's: from, to."""
    number, threads = _thread_number(), _thread_count()
    return count * number // threads, count * (number + 1) // threads


def run(function: int, argument: bytes, num_threads: int) -> None:
    """`function(argument)`, at its address, by so many threads at once, this one among them."""
    _parallel(function, argument, num_threads, 0)


_scratch = threading.local()


@contextlib.contextmanager
def scratch_of_its_own() -> Iterator[None]:
    """What is called inside gets memory that nothing else will get."""
    before, _scratch.held = getattr(_scratch, "held", None), None
    try:
        yield
    finally:
        _scratch.held = before


def scratch(num_floats: int) -> torch.Tensor:
    """Memory that a kernel may use while it runs; every Python thread has its own."""
    held: torch.Tensor | None = getattr(_scratch, "held", None)
    if held is None or held.numel() < num_floats:
        held = _scratch.held = torch.empty(num_floats, dtype=torch.float32)
    return held
