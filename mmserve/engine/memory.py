"""How much memory the KV cache may take, and how long a context fits into it."""

import psutil
import torch

from mmserve.config import GIB, CacheConfig, DenseCopyName, EngineConfig, ModelConfig
from mmserve.errors import SetupError

_CPU_DEFAULT_BYTES = 2 * GIB
_GPU_DEFAULT_UTILIZATION = 0.9
_COPY_SHARE = 0.25


def cache_bytes(config: CacheConfig, device: torch.device, num_activation_bytes: int = 0) -> int:
    """Bytes for the KV cache: as asked (`SetupError` if not free), else a share of the total, at most what is free.

    `num_activation_bytes` are what a step takes beside what is in use already.
    """
    free, total = _free_and_total(device)
    free -= num_activation_bytes
    if config.memory_bytes is not None:
        if config.memory_bytes > free:
            raise SetupError(
                "insufficient_memory",
                f"--kv-cache-memory-bytes asks for {config.memory_bytes / GIB:.2f} GiB, but {free / GIB:.2f} GiB are"
                " free: ask for less, or close other programs",
            )
        return config.memory_bytes
    if config.memory_utilization is None and device.type != "cuda":
        return max(min(_CPU_DEFAULT_BYTES, free), 0)
    return _share_that_is_free(config, device, free, total)


def keeps_dense_copy(asked: DenseCopyName, model: ModelConfig, cache: CacheConfig, device: torch.device) -> bool:
    """Whether quantized weights have a copy in 16 bits beside them: where there is memory to spare."""
    if asked != "auto":
        return asked == "keep"
    free = _share_that_is_free(cache, device, *_free_and_total(device))
    return model.num_matrix_weights * torch.bfloat16.itemsize <= free * _COPY_SHARE


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory."""
    if device.type == "cuda":
        # What an earlier engine of this process left with the allocator is free too.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _share_that_is_free(config: CacheConfig, device: torch.device, free: int, total: int) -> int:
    """Of `free` bytes, those within the share of the memory that may be in use."""
    usual = _GPU_DEFAULT_UTILIZATION if device.type == "cuda" else 1.0
    used_at_most = int(total * (usual if config.memory_utilization is None else config.memory_utilization))
    return max(min(used_at_most - (total - free), free), 0)


def wanted_context(config: EngineConfig, max_context: int) -> int:
    """The context that was asked for, or the model's. `SetupError` for more than the model has."""
    wanted = config.max_model_len or max_context
    if wanted > max_context:
        raise SetupError(
            "model_unavailable",
            f"--max-model-len {wanted} exceeds the {max_context} positions that the model has",
        )
    return wanted


def fit_context(config: EngineConfig, wanted: int, num_bytes: int, bytes_per_block: int) -> tuple[int, int]:
    """The context's length and the number of blocks. A context that was asked for and does not fit is an error."""
    block_size = config.cache.block_size
    num_blocks = num_bytes // bytes_per_block
    needed = -(-wanted // block_size) * bytes_per_block
    if num_blocks == 0 or (config.max_model_len and num_blocks * bytes_per_block < needed):
        there = num_blocks * bytes_per_block
        raise SetupError(
            "insufficient_memory",
            f"a context of {wanted} tokens needs {needed / GIB:.2f} GiB of KV cache, but there are"
            f" {there / GIB:.2f} GiB, {(needed - there) / GIB:.2f} GiB too few:"
            " raise --kv-cache-memory-bytes or --gpu-memory-utilization, or"
            " lower --max-model-len, --max-num-batched-tokens or --max-num-seqs; of a quantized model,"
            " --dense-copy never takes less",
        )
    return min(wanted, num_blocks * block_size), num_blocks


def tensor_bytes(root: object) -> int:
    """Memory of all tensors that an object of this package holds, directly or through others; what is shared, once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            key, size = _storage(item)
            found[key] = size
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif type(item).__module__.startswith("mmserve."):
            waiting.append(getattr(item, "__dict__", {}))
    return sum(found.values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    # What oneDNN has packed has no storage to ask.
    return id(tensor), tensor.numel() * tensor.element_size()
