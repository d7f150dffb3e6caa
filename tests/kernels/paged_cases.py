"""Random sequences in a paged cache, of which everything that no sequence owns is NaN."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernel_checks import DEVICE


@dataclass(frozen=True)
class PagedCase:
    """What the kernels read; `wide` is the same in float32, for the twins."""

    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    def wide(self) -> "PagedCase":
        return PagedCase(self.kv_cache.float(), self.block_tables, self.context_lens)


def paged_case(
    context_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    num_shared_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PagedCase:
    """Sequences in scrambled blocks; the first `num_shared_blocks` of all that are not empty are the same."""
    tables, num_blocks = _tables(context_lens, block_size, num_shared_blocks)
    kv_cache = torch.randn(num_blocks + 1, 2, num_kv_heads, block_size, head_dim, device=DEVICE).to(dtype)
    kv_cache[num_blocks] = math.nan
    for table, context_len in zip(tables, context_lens, strict=True):
        if context_len % block_size:
            kv_cache[table[-1], :, :, context_len % block_size :] = math.nan
    width = max(len(table) for table in tables) + 1
    padded = [table + [num_blocks] * (width - len(table)) for table in tables]
    block_tables, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (padded, context_lens))
    return PagedCase(kv_cache, block_tables, lengths)


def _tables(context_lens: Sequence[int], block_size: int, num_shared_blocks: int) -> tuple[list[list[int]], int]:
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = num_shared_blocks + sum(max(count - num_shared_blocks, 0) for count in counts)
    free = random.sample(range(num_blocks), num_blocks)
    shared = [free.pop() for _ in range(num_shared_blocks)]
    return [shared + [free.pop() for _ in range(count - num_shared_blocks)] if count else [] for count in counts], (
        num_blocks
    )


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query, its heads `[H, D]`, over k and v `[L, KV, D]`, head by head in float64."""
    group, out = q.shape[0] // k.shape[1], torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(q.shape[0]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        out[head] = torch.softmax(keys @ q[head].double() * scale, dim=0) @ values
    return out


def naive_rows(case: PagedCase, i: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first K and V of sequence i, `[length, KV, D]`, read one by one."""
    block_size = case.kv_cache.shape[3]
    places = [(int(case.block_tables[i, j // block_size]), j % block_size) for j in range(length)]
    k, v = ([case.kv_cache[block, part, :, offset] for block, offset in places] for part in (0, 1))
    return torch.stack(k), torch.stack(v)
