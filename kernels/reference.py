"""The kernels in plain PyTorch: what runs on a CPU, and the twin that every other implementation is tested against.

Shapes: T tokens of a step, H query heads, KV key/value heads, D head size, L context length. A layer's paged cache is
`[num_blocks, block_size, 2, KV, D]`; a slot is `block_id * block_size + offset`.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head. x `[T, H, D]`; cos and sin `[T, 1, D]`, the first half of sin negated."""
    return (x * cos).addcmul_(torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` where x is gate and up side by side, `[T, 2 * I]` -> `[T, I]` (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k and v, `[T, KV, D]`, to the slots `[T]` of the paged cache."""
    slots = kv_cache.view(-1, *kv_cache.shape[2:])
    slots[:, 0].index_copy_(0, slot_mapping, k)
    slots[:, 1].index_copy_(0, slot_mapping, v)


def gather_kv(kv_cache: torch.Tensor, block_ids: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, `[num_sequences, KV, L, D]` each, of equally many blocks a sequence, `[num_sequences * blocks]`."""
    gathered = kv_cache.index_select(0, block_ids).view(num_sequences, -1, *kv_cache.shape[2:])
    return gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)


def paged_attention_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a sequence, `[B, H, D]`, over its paged context; mask `[B, 1, 1, L]` is added to the scores."""
    k, v = gather_kv(kv_cache, block_ids, q.shape[0])
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


def paged_attention_chunk(
    q: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """A chunk of one sequence, q `[T, H, D]`, over its paged context; mask `[T, L]` is added to the scores."""
    k, v = gather_kv(kv_cache, block_ids, 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[:, :, : mask.shape[1]], v[:, :, : mask.shape[1]], mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """A prompt's first chunk attends to itself: q `[T, H, D]`, k and v `[T, KV, D]`."""
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
