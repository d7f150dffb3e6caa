"""FP8 and INT8: every layout that is stored, against the formula; and what is multiplied in which form."""

from typing import Any

import pytest
import torch
from stored_matrices import StoredMatrices

from mmserve.quantization.compressed_tensors import CompressedTensorsScheme
from mmserve.quantization.eight_bit import FP8_MAX, CpuInt8Weight, quantize_rows
from mmserve.quantization.fp8 import Fp8Scheme
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement

IN, OUT = 256, 160
FP8 = torch.float8_e4m3fn
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]


def place(dtype: torch.dtype, keeps_copy: bool) -> Placement:
    return Placement(dtype, torch.device("cpu"), keeps_copy)


def load(scheme: Any, source: StoredMatrices, placement: Placement) -> LinearWeight:
    weight: LinearWeight | None = scheme.load(LinearSpec(("a",), IN, (OUT,)), source, placement)
    assert weight is not None
    assert source.taken >= set(source.tensors)
    return weight


def fp8_numbers() -> torch.Tensor:
    return (60 * torch.randn(OUT, IN)).to(FP8)


def activations(dtype: torch.dtype, input_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows, and the same as FP8 gives them back, float64."""
    x = (3 * torch.randn(5, IN)).to(dtype)
    if input_scale is None:
        numbers, scales = quantize_rows(x, "fp8")
        return x, numbers.double() * scales.double()
    return x, (x.float() / input_scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).double() * input_scale


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("keeps_copy", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("is_static", [True, False])
def test_fp8(dtype: torch.dtype, tolerance: float, keeps_copy: bool, per_channel: bool, is_static: bool) -> None:
    numbers = fp8_numbers()
    scales = 0.001 + 0.01 * torch.rand(OUT if per_channel else 1, 1)
    source = StoredMatrices({"a.weight": numbers, "a.weight_scale": scales})
    if is_static:
        source.tensors["a.input_scale"] = torch.tensor(0.02)
    scheme = Fp8Scheme({"activation_scheme": "static" if is_static else "dynamic"})
    x, rounded = activations(dtype, 0.02 if is_static else None)
    out = load(scheme, source, place(dtype, keeps_copy)).apply(x, None)
    assert out.dtype is dtype
    assert relative_error(out, rounded @ (numbers.double() * scales.double()).T) < tolerance


@pytest.mark.parametrize("keeps_copy", [True, False])
@pytest.mark.parametrize("name", ["fp8", "compressed-tensors"])
def test_fp8_blocks(keeps_copy: bool, name: str) -> None:
    """The last block of rows is smaller. On a CPU activations stay as they are."""
    numbers, scales = fp8_numbers(), 0.001 + 0.01 * torch.rand(2, 2)
    wide = scales.repeat_interleave(128, 0)[:OUT].repeat_interleave(128, 1)
    scheme: Any = Fp8Scheme({"activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    source = StoredMatrices({"a.weight": numbers, "a.weight_scale_inv": scales})
    if name == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
        scheme = CompressedTensorsScheme({"config_groups": {"g": {"weights": weights, "targets": ["Linear"]}}})
        source = StoredMatrices({"a.weight": numbers, "a.weight_scale": scales})
    x = torch.randn(5, IN)
    expected = x.double() @ (numbers.double() * wide.double()).T
    bias = torch.randn(OUT)
    weight = load(scheme, source, place(torch.float32, keeps_copy))
    assert relative_error(weight.apply(x, None), expected) < 1e-5
    assert relative_error(weight.apply(x, bias), expected + bias) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("keeps_copy", [True, False])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_int8(dtype: torch.dtype, tolerance: float, keeps_copy: bool, num_rows: int) -> None:
    numbers, scales = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), 0.001 + 0.01 * torch.rand(OUT, 1)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    groups = {"g": {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}}
    source = StoredMatrices({"a.weight": numbers, "a.weight_scale": scales})
    weight = load(CompressedTensorsScheme({"config_groups": groups}), source, place(dtype, keeps_copy))
    assert isinstance(weight, CpuInt8Weight)
    x = torch.randn(num_rows, IN).to(dtype)
    row_numbers, row_scales = quantize_rows(x, "int8")
    expected = row_numbers.double() @ numbers.double().T * row_scales.double() * scales.double().T
    assert relative_error(weight.apply(x, None), expected) < tolerance


@pytest.mark.parametrize("keeps_copy", [True, False])
def test_int8_of_weights_alone(keeps_copy: bool) -> None:
    numbers, scales = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), 0.001 + 0.01 * torch.rand(OUT, 1)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    source = StoredMatrices({"a.weight": numbers, "a.weight_scale": scales})
    scheme = CompressedTensorsScheme({"config_groups": {"g": {"weights": weights, "targets": ["Linear"]}}})
    x = torch.randn(3, IN)
    out = load(scheme, source, place(torch.float32, keeps_copy)).apply(x, None)
    assert relative_error(out, x.double() @ (numbers.double() * scales.double()).T) < 1e-5
