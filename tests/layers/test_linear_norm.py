"""Linear layers and norms against their formulas."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmserve.kernels import reference
from mmserve.layers.linear import Linear
from mmserve.layers.norm import RMSNorm
from mmserve.quantization.dense import DenseWeight


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(has_bias: bool) -> None:
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    bias = torch.randn(3) if has_bias else None
    expected = torch.stack([weight @ row for row in x]) + (0.0 if bias is None else bias)
    torch.testing.assert_close(Linear(DenseWeight(weight), bias)(x), expected, rtol=1e-5, atol=1e-5)


def test_norm_equals_transformers() -> None:
    norm = LlamaRMSNorm(32, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(4, 3, 32)
    ours = RMSNorm(norm.weight.detach(), 1e-5, reference)
    torch.testing.assert_close(ours(x), norm(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_one_row_is_normed_as_among_others(dtype: torch.dtype, tolerance: float) -> None:
    """A single row takes another kernel."""
    norm = RMSNorm(torch.randn(48, dtype=dtype), 1e-5, reference)
    x = torch.tensor([[0.01], [1.0], [30.0]], dtype=dtype) * torch.randn(3, 48, dtype=dtype)
    together, alone = norm(x), torch.cat([norm(row[None]) for row in x])
    assert float((alone - together).norm() / together.norm()) < tolerance


@pytest.mark.parametrize("num_rows", [1, 2])
def test_norm_of_zeros_is_zero(num_rows: int) -> None:
    zeros = torch.zeros(num_rows, 8)
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6, reference)(zeros), zeros)
