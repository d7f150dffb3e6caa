"""Self-attention of the vision towers over images, or windows of them, packed into one batch without padding."""

import torch

from mmserve.layers.kernel_set import KernelSet
from mmserve.layers.linear import Linear
from mmserve.vision.attention_backends import Attend

Rotary = tuple[torch.Tensor, torch.Tensor]


class PackedSelfAttention:
    """`qkv` gives queries, keys and values of all heads one after the other, `[T, 3 * H * D]`."""

    def __init__(self, qkv: Linear, out: Linear, num_heads: int, kernels: KernelSet) -> None:
        self._qkv = qkv
        self._out = out
        self._num_heads = num_heads
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, attend: Attend, rotary: Rotary | None = None) -> torch.Tensor:
        """x `[T, hidden]`, in sequences that `attend` knows.

        `rotary` is cos and sin as `apply_rotary` takes them, in float32: half precision is too coarse for large grids.
        """
        qkv = self._qkv(x).view(x.shape[0], 3 * self._num_heads, -1)
        qk, v = qkv[:, : 2 * self._num_heads], qkv[:, 2 * self._num_heads :]
        if rotary is not None:
            # The kernel of a GPU computes in float32 whatever it reads.
            wide = qk if x.device.type == "cuda" else qk.float()
            qk = self._kernels.apply_rotary(wide, *rotary).to(x.dtype)
        q, k = qk.chunk(2, dim=1)
        return self._out(attend(q, k, v, q.shape[-1] ** -0.5).reshape(x.shape[0], -1))
