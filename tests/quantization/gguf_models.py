"""GGUF files of every kind of block, and checkpoints in full precision of what their blocks stand for."""

import shutil
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from reference_gguf import save_reference_gguf
from safetensors.numpy import load_file, save_file

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
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
