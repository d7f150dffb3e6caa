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


def test_norm_of_zeros_is_zero() -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6, reference)(zeros), zeros)
