"""Functions that Numba compiles for this processor, run by PyTorch's own threads.

What has been compiled is kept where Numba keeps such: beside the source, or in the user's cache.
"""

import contextlib
import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba.core import types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from torch.utils._python_dispatch import TorchDispatchMode

from mmserve.kernels import openmp, simd

# Of a kernel's arguments at most.
_NUM_ARGUMENTS = 16
Argument = int | torch.Tensor


class Kernel:
    """`function(arguments)`, an array of int64 at the address that it is given, compiled when this is made.

    Of variables outside it may use modules, functions of modules, and the numbers `constants`.
    """

    def __init__(self, function: Callable[[Any], None], *constants: int) -> None:
        # Numba keeps it under this name: processes that start at once must not take others of its kind for it.
        digest = _digest(function.__code__.co_filename)
        function.__qualname__ = "_".join((function.__qualname__, *map(str, constants), digest))
        compiled: Any = CFunc(function, ((types.voidptr,), types.void), locals={}, options={})
        compiled._cache = _cache_of(function)
        compiled.compile()
        self._compiled = compiled
        self._address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_threads: int, *arguments: Argument) -> None:
        """By this thread alone, or by so many of PyTorch's. Tensors are handed over as their addresses."""
        numbers = [one if isinstance(one, int) else one.data_ptr() for one in arguments]
        packed = struct.pack(f"{len(numbers)}q", *numbers)
        recording: Recording | None = getattr(_local, "recording", None)
        if recording is not None:
            recording.add(self._address, numbers, arguments)
        if num_threads == 1:
            self._call(packed)
        else:
            openmp.run(self._address, packed, num_threads)


_local = threading.local()


class Recording:
    """Calls of kernels that can be made again as one: with the same tensors, whose contents may have changed."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, list[int]]] = []
        self._kept: list[Argument] = []
        self._replay = _replay_kernel()
        self._arguments = self._table = torch.empty(0, dtype=torch.int64)
        self.is_complete = False

    def add(self, address: int, numbers: list[int], arguments: Sequence[Argument]) -> None:
        """`arguments` have to stay in memory."""
        self._calls.append((address, numbers))
        self._kept += arguments

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """What is called inside. `is_complete` says afterwards whether kernels have done all of the work there."""
        watch = _Watch()
        _local.recording = self
        try:
            with watch, openmp.scratch_of_its_own():
                yield
        finally:
            del _local.recording
        self.is_complete = not watch.has_others
        padded = [numbers + [0] * (_NUM_ARGUMENTS - len(numbers)) for _, numbers in self._calls]
        self._arguments = torch.tensor(padded, dtype=torch.int64)
        row_bytes = _NUM_ARGUMENTS * self._arguments.element_size()
        rows = [self._arguments.data_ptr() + i * row_bytes for i in range(len(padded))]
        calls = [[address, row] for (address, _), row in zip(self._calls, rows, strict=True)]
        self._table = torch.tensor(calls, dtype=torch.int64)

    def replay(self, num_threads: int) -> None:
        """All calls in turn, each by all threads, as many as there were."""
        self._replay(num_threads, self._table, len(self._calls))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether PyTorch computes anything itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_others = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch imports its compiler for this, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, _: object, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.__name__.startswith(("empty", "new_empty")):
            self.has_others = True
        return func(*args, **(kwargs or {}))


@cache
def _replay_kernel() -> Kernel:
    def kernel(arguments: Any) -> None:
        table, num_calls = simd.unpack(arguments, 0, 2)
        for call in range(table, table + 16 * num_calls, 16):
            simd.call(simd.load_int64(call), simd.load_int64(call + 8))
            openmp.barrier()

    return Kernel(kernel)


def _cache_of(function: Callable[[Any], None]) -> Any:
    try:
        return _Cache(function)
    except RuntimeError:
        # There is no folder that may be written.
        return NullCache()


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's, which is not worth failing for."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception:
            # Whatever a damaged file makes of unpickling: it is compiled anew.
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(*arguments)


@cache
def _digest(file: str) -> str:
    """Of a kernel's own source and of what all kernels call."""
    sources = (Path(file), *(Path(module.__file__ or "") for module in (simd, openmp)))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@cache
def float_bits(value: float) -> int:
    """A float32 as it is handed to a kernel."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
