"""Self-attention of the vision towers over images, or windows of them, packed into one batch without padding."""

from collections.abc import Sequence

import torch

from mmserve.kernels.cpu import varlen_attention
from mmserve.kernels.reference import apply_rotary
from mmserve.layers.linear import Linear


class PackedSelfAttention:
    """`qkv` gives queries, keys and values of all heads one after the other, `[T, 3 * H * D]`."""

    def __init__(self, qkv: Linear, out: Linear, num_heads: int) -> None:
        self._qkv = qkv
        self._out = out
        self._num_heads = num_heads

    def __call__(
        self, x: torch.Tensor, lengths: Sequence[int], rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """x `[T, hidden]` in sequences of `lengths`, each of which sees all of itself and nothing else.

        `rotary` is cos and sin as `apply_rotary` takes them, in float32: half precision is too coarse for large grids.
        """
        qkv = self._qkv(x).view(x.shape[0], 3 * self._num_heads, -1)
        qk, v = qkv[:, : 2 * self._num_heads], qkv[:, 2 * self._num_heads :]
        if rotary is not None:
            qk = apply_rotary(qk.float(), *rotary).to(x.dtype)
        q, k = qk.chunk(2, dim=1)
        return self._out(varlen_attention(q, k, v, lengths, q.shape[-1] ** -0.5).view(x.shape[0], -1))
