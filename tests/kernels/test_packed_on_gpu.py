"""GGUF's blocks in the form that a GPU multiplies: four bits, or pairs of them."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from kernel_checks import DEVICE, randn, relative_error

from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.gpu_int4 import MAX_PACKED_ROWS, MAX_PACKED_ROWS_WITHOUT_COPY, GpuInt4Weight
from mmserve.quantization.scheme import Placement

# Where in a block its float16 factors are.
KINDS = {"Q4_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q8_0": [0]}


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_unpacking(kind: str) -> None:
    block_size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (48, 256 // block_size * num_bytes), dtype=np.uint8)
    for place in KINDS[kind]:
        factors = generator.normal(0, 0.01, (48, 256 // block_size, 1)).astype(np.float16)
        data.reshape(48, 256 // block_size, -1)[:, :, place : place + 2] = factors.view(np.uint8)
    ints = grouped_ints(torch.from_numpy(data), kind)
    matrix = ints.dequantized().to(DEVICE)
    for keeps_copy in (False, True):
        weight = GpuInt4Weight(ints, Placement(torch.float16, DEVICE, keeps_copy))
        assert relative_error(weight._unpacked(torch.float16), matrix) < 1e-3
        for num_rows in (1, 5, MAX_PACKED_ROWS + 1, MAX_PACKED_ROWS_WITHOUT_COPY + 1):
            x, bias = randn(num_rows, 256, dtype=torch.float16), randn(48, dtype=torch.float16)
            assert relative_error(weight.apply(x, bias), x.float() @ matrix.T + bias) < 1e-3
