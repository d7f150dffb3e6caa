"""Dense weights, plain and prepacked, against products in float64."""

import pytest
import torch

from mmserve.quantization.dense import HAS_ONEDNN, DenseWeight, PrepackedWeight, dense_weight


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_products(num_rows: int, has_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(num_rows, 96, dtype=dtype), torch.randn(48, 96, dtype=dtype)
    bias = torch.randn(48, dtype=dtype) if has_bias else None
    reference = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    out = dense_weight(weight).apply(x, bias)
    assert out.dtype is dtype
    assert out.shape == (num_rows, 48)
    assert relative_error(out, reference) < tolerance


def test_the_form_follows_from_the_precision() -> None:
    assert isinstance(dense_weight(torch.zeros(2, 2)), DenseWeight)
    packed = dense_weight(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert isinstance(packed, PrepackedWeight) is HAS_ONEDNN


def test_a_weight_that_is_a_view_is_packed_by_its_values() -> None:
    stored = torch.randn(96, 48, dtype=torch.bfloat16)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    out = dense_weight(stored.T).apply(x, None)
    assert relative_error(out, x.double() @ stored.double()) < 4e-3


def test_packing_leaves_the_matrix_as_it_was() -> None:
    """A tied embedding is both the first layer and the last."""
    weight = torch.randn(48, 96, dtype=torch.bfloat16)
    before = weight.clone()
    dense_weight(weight).apply(torch.randn(20, 96, dtype=torch.bfloat16), None)
    assert torch.equal(weight, before)
