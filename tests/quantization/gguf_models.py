"""GGUF files of every kind of block, and checkpoints in full precision of what their blocks stand for."""

import shutil
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from reference_gguf import save_reference_gguf
from safetensors.numpy import load_file, save_file

# By kind: bits, columns a group, and where in a block its float16 factors are.
KINDS = {
    "Q4_0": (4, 32, [0]),
    "Q4_1": (4, 32, [0, 2]),
    "Q5_0": (5, 32, [0]),
    "Q5_1": (5, 32, [0, 2]),
    "Q8_0": (8, 32, [0]),
    "Q4_K": (4, 32, [0, 2]),
    "Q5_K": (5, 32, [0, 2]),
    "Q6_K": (6, 16, [208]),
}


def blocks_of(kind: str, out_features: int, in_features: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes under small factors, and the matrix that the gguf package reads out of them, float32.

    So bits of every value stand in every place, not only what a quantizer writes.
    """
    block_size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    num_blocks = in_features // block_size
    data = generator.integers(0, 256, (out_features, num_blocks * num_bytes), dtype=np.uint8)
    for place in KINDS[kind][2]:
        factors = generator.normal(0, 0.01, (out_features, num_blocks, 1)).astype(np.float16)
        data.reshape(out_features, num_blocks, -1)[:, :, place : place + 2] = factors.view(np.uint8)
    return torch.from_numpy(data), torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[kind]).copy())


# Where in a block its factor is, the middle of the numbers, and about how large these are under the block's scales.
K_BLOCKS = {"Q4_K": (0, 7.5, 170.0), "Q5_K": (0, 15.5, 340.0), "Q6_K": (208, None, 1400.0)}


def random_blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of random numbers for a matrix of this shape: the gguf package cannot quantize to these kinds.

    Minima are where they put the middle of the numbers at 0.
    """
    if values.ndim == 1 or kind.name not in K_BLOCKS:
        quantized: np.ndarray = quants.quantize(values, kind)
        return quantized
    block_size, num_bytes = GGML_QUANT_SIZES[kind]
    place, middle, size = K_BLOCKS[kind.name]
    # The same for the same matrix.
    generator = np.random.default_rng(int(abs(values[0, 0]) * 1e9))
    blocks = generator.integers(0, 256, (values.shape[0], values.shape[1] // block_size, num_bytes), dtype=np.uint8)
    factors = generator.uniform(0.03, 0.09, (*blocks.shape[:2], 1)) / size
    blocks[:, :, place : place + 2] = factors.astype(np.float16).view(np.uint8)
    if middle is not None:
        blocks[:, :, 2:4] = (factors * middle).astype(np.float16).view(np.uint8)
        # The scales of 6 bits, and minima that are the same.
        blocks[:, :, 8:12] = blocks[:, :, 4:8]
        blocks[:, :, 12:16] = (blocks[:, :, 12:16] & 0xF) * 17
    return blocks.reshape(values.shape[0], -1)


def save_blocks(full: Path, path: Path, kind: str) -> Path:
    """The checkpoint in `full` as `path`, its matrices in blocks of `kind`."""
    return save_reference_gguf(full, path, type_name=kind, quantize=random_blocks)


def unpacked(full: Path, out: Path, kind_name: str) -> Path:
    """What `save_blocks` stores, in float32."""
    kind = GGMLQuantizationType[kind_name]
    shutil.copytree(full, out)
    tensors = load_file(out / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2:
            tensors[name] = quants.dequantize(random_blocks(values, kind), kind).astype(np.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
