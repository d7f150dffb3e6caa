"""Functions that Numba compiles for this processor, run by PyTorch's own threads.

What has been compiled is kept where Numba keeps such: beside the source, or in the user's cache.
"""

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from mmserve.kernels import openmp, simd


class Kernel:
    """`function(arguments)`, an array of int64 at the address that it is given, compiled when this is made.

    Of variables outside it may use modules, functions of modules, and numbers.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        compiled: Any = CFunc(function, ((types.voidptr,), types.void), locals={}, options={})
        compiled._cache = _Cache(function)
        compiled.compile()
        self._compiled = compiled
        self._address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_threads: int, *arguments: int) -> None:
        """By this thread alone, or by so many of PyTorch's."""
        packed = struct.pack(f"{len(arguments)}q", *arguments)
        if num_threads == 1:
            self._call(packed)
        else:
            openmp.run(self._address, packed, num_threads)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's, which knows changes of a function's own file, but not of what the function calls."""

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(signature, codegen), _digest())


@cache
def _digest() -> str:
    sources = (Path(module.__file__ or "") for module in (simd, openmp))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@cache
def float_bits(value: float) -> int:
    """A float32 as it is handed to a kernel."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
