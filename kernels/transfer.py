"""Small tensors between host and device without waiting for what the device is doing."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch


class Event(Protocol):
    """What is used of `torch.cuda.Event`, which has no types."""

    def record(self, stream: torch.cuda.Stream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds."""


HostValues = npt.NDArray[np.generic] | Sequence[int] | Sequence[float]


def to_device(values: HostValues, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The values as a tensor on `device`; a copy from pageable memory would wait for everything launched before it."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, valid once an event recorded after this call has passed."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def record_event(device: torch.device, *, enable_timing: bool = False) -> Event:
    """Marks on a GPU what was launched there so far; elsewhere everything is done when its call returns."""
    event: Any = torch.cuda.Event(enable_timing=enable_timing)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return cast(Event, event)
