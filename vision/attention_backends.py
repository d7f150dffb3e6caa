"""What computes the attention of vision towers: sequences packed without padding, each seeing all of itself alone."""

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmserve.config import VisionAttentionName
from mmserve.errors import SetupError
from mmserve.kernels import cpu
from mmserve.kernels.transfer import to_device

# Of q, k and v `[T, H, D]`, which may be strided, and the factor on the scores -> `[T, H, D]`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

# From so many rows on, one sequence keeps a GPU busy alone.
_LONG = 2048
# Up to here our kernel is the fastest: 4 x 1,024 patches, 16 heads of 72, on an H200 0.129 ms against 0.161; with 4,096
# patches 1.24 against 0.94.
_MAX_TRITON_LENGTH = 1024
# cuDNN is the fastest for long sequences (11,088 patches, 16 heads of 80: 1.60 ms, flash 2.42, on an H200), but has to
# plan for each length first, which only pays where a length comes again.
_CALLS_BEFORE_A_PLAN = 16
_MAX_KNOWN_LENGTHS = 4096
_FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_WITH_CUDNN = (SDPBackend.CUDNN_ATTENTION, *_FUSED)
_MAX_PREPARED = 32


class VisionAttention(Protocol):
    def over(self, lengths: Sequence[int]) -> Attend:
        """Attention within sequences of these lengths, which are on the device from then on."""


def vision_attention(name: VisionAttentionName, device: torch.device) -> VisionAttention:
    """Raises `SetupError`: `missing_dependency` without an xformers that works, `model_unavailable` on a CPU."""
    on_gpu = device.type == "cuda"
    if name == "torch" or (name == "auto" and not on_gpu):
        return Remembered(TorchAttention(device))
    if not on_gpu:
        raise SetupError(
            "model_unavailable",
            f"--vision-attention {name} needs a GPU, and the device is {device}: take auto or torch",
            param="vision_attention",
        )
    if name == "xformers":
        return Remembered(XformersAttention(device))
    triton = TritonAttention(device)
    return Remembered(triton if name == "triton" else AutoAttention(triton, TorchAttention(device)))


class Remembered:
    """What was prepared for the lengths that were used last."""

    def __init__(self, attention: VisionAttention) -> None:
        self.attention = attention
        self._prepared: OrderedDict[tuple[int, ...], Attend] = OrderedDict()

    def over(self, lengths: Sequence[int]) -> Attend:
        key = tuple(lengths)
        if key not in self._prepared:
            self._prepared[key] = self.attention.over(key)
            if len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key]


class AutoAttention:
    """Windows and small images by a kernel that takes any number of them at once, long ones by PyTorch's."""

    def __init__(self, windows: VisionAttention, images: VisionAttention) -> None:
        self._windows = windows
        self._images = images

    def over(self, lengths: Sequence[int]) -> Attend:
        return (self._windows if max(lengths) <= _MAX_TRITON_LENGTH else self._images).over(lengths)


@dataclass(frozen=True)
class _Run:
    """`count` neighbours of one length, from row `start`."""

    start: int
    count: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count * self.length)


class TorchAttention:
    """PyTorch's fused attention: neighbours of one length are one batch, but for long ones on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._num_calls: Counter[int] = Counter()

    def over(self, lengths: Sequence[int]) -> Attend:
        if self._on_gpu:
            return partial(self._attend_all, tuple(_runs(lengths)))
        return lambda q, k, v, scale: cpu.varlen_attention(q, k, v, lengths, scale)

    def _attend_all(
        self, runs: tuple[_Run, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if len(runs) == 1:
            return self._attend(runs[0], q, k, v, scale)
        return torch.cat([self._attend(run, q[run.rows], k[run.rows], v[run.rows], scale) for run in runs])

    def _attend(self, run: _Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(list(self._choices(run.length)), set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return attended.transpose(1, 2).flatten(0, 1)

    def _choices(self, length: int) -> tuple[SDPBackend, ...]:
        if length < _LONG:
            return _FUSED
        if len(self._num_calls) >= _MAX_KNOWN_LENGTHS:
            self._num_calls.clear()
        self._num_calls[length] += 1
        return _WITH_CUDNN if self._num_calls[length] > _CALLS_BEFORE_A_PLAN else _FUSED


def _runs(lengths: Sequence[int]) -> Iterator[_Run]:
    start = 0
    for length, group in groupby(lengths):
        count = len(list(group))
        # One by one, since cuDNN plans for each size of a batch as well.
        sizes = [1] * count if length >= _LONG else [count]
        for size in sizes:
            yield _Run(start, size, length)
            start += size * length


class TritonAttention:
    """Our own kernel: one launch for sequences of any lengths."""

    def __init__(self, device: torch.device) -> None:
        from mmserve.kernels import varlen

        self._device = device
        self._varlen = varlen

    def over(self, lengths: Sequence[int]) -> Attend:
        starts = to_device([0, *accumulate(lengths)], self._device, torch.int32)
        query_tile = self._varlen.query_tile(lengths)
        tiles = to_device(self._varlen.query_tiles(lengths, query_tile).numpy(), self._device)
        attend = self._varlen.varlen_attention
        return lambda q, k, v, scale: attend(q, k, v, starts, tiles, scale, query_tile=query_tile)


class XformersAttention:
    """xFormers' memory-efficient attention (Lefaudeux et al. 2022) with a block-diagonal mask."""

    def __init__(self, device: torch.device) -> None:
        """Raises `SetupError` (`missing_dependency`) where it is not installed or cannot attend to anything."""
        self._device = device
        try:
            with _quietly():
                from xformers import ops
                from xformers.ops.fmha.attn_bias import BlockDiagonalMask

                self._attention: Any = ops.memory_efficient_attention
                self._mask: Any = BlockDiagonalMask
                self._attend_once()
        except (ImportError, OSError, RuntimeError) as error:
            raise _unusable_xformers(error) from error

    def over(self, lengths: Sequence[int]) -> Attend:
        mask = self._mask.from_seqlens(list(lengths), device=self._device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            attended: torch.Tensor = self._attention(q[None], k[None], v[None], attn_bias=mask, scale=scale)[0]
            return attended

        return attend

    def _attend_once(self) -> None:
        """Its compiled part may not fit this torch or this GPU, which importing it does not tell."""
        x = torch.zeros(3, 1, 64, dtype=torch.float16, device=self._device)
        self.over([1, 2])(x, x, x, 1.0)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what xFormers warns of and logs as it is imported: the error says in a sentence what matters of it."""
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _unusable_xformers(error: Exception) -> SetupError:
    if isinstance(error, ModuleNotFoundError) and error.name == "xformers":
        sentence = "--vision-attention xformers needs xformers: pip install 'mmserve[xformers]', or take auto"
    else:
        reason = str(error).partition("\n")[0].removesuffix(":")
        sentence = (
            f"--vision-attention xformers cannot be used: the xformers that is installed does not work with torch "
            f"{torch.__version__} on this machine ({reason}); install one built for this torch, or take auto"
        )
    return SetupError("missing_dependency", sentence, param="vision_attention")
