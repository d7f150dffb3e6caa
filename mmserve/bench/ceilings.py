"""What a device does at best, measured: one large product of matrices, one large copy."""

import gc
import time
from collections.abc import Callable

import torch

from mmserve.bench.limits import Ceilings

_PRODUCT_SIDE = 8192
_COPY_BYTES = 2 * 1024**3
_WARM_UPS, _REPEATS = 3, 10


def measure_ceilings(
    device: torch.device | str, *, side: int = _PRODUCT_SIDE, copy_bytes: int = _COPY_BYTES
) -> Ceilings:
    """The fastest of several runs of each: a cube of `side` in bfloat16, and a copy (bytes read and written count).

    Needs twice `copy_bytes` of the device's memory.
    """
    _empty_cache()
    product_seconds = _product_seconds(torch.device(device), side)
    copy_seconds = _copy_seconds(torch.device(device), copy_bytes)
    _empty_cache()
    return Ceilings(2 * side**3 / product_seconds, 2 * copy_bytes / copy_seconds)


def _product_seconds(device: torch.device, side: int) -> float:
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return _fastest(lambda: torch.mm(left, right, out=product), device)


def _copy_seconds(device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _fastest(lambda: target.copy_(source), device)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(_WARM_UPS):
        call()
    return min(_seconds(call, device) for _ in range(_REPEATS))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _empty_cache() -> None:
    """What an engine of this process left behind goes back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
