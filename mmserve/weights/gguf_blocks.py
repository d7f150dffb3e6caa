"""Dequantises GGUF blocks; the arithmetic is the `gguf` package's, the work is spread over threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# About 1 MiB of float32: large enough that Python's share does not show, small enough to stay in a core's cache.
_ELEMENTS_PER_TASK = 1 << 18


def dequantize(blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    """Blocks uint8 [rows, bytes of a row] -> float32 [rows, columns]."""
    kind = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // block_bytes * block_size
    values = torch.empty(num_rows, num_columns)
    rows_per_task = max(1, _ELEMENTS_PER_TASK // num_columns)

    def fill(start: int) -> None:
        part = slice(start, start + rows_per_task)
        values[part] = torch.from_numpy(quants.dequantize(blocks[part].numpy(), kind))

    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        list(pool.map(fill, range(0, num_rows, rows_per_task)))
    return values
