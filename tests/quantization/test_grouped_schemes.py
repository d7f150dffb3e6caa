"""AWQ, GPTQ and compressed-tensors of a few bits: every number, scale and zero point where its format has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stored_matrices import (
    StoredMatrices,
    awq_words,
    compressed_words,
    gptq_words,
    random_parts,
    value,
)

from mmserve.errors import SetupError
from mmserve.quantization.awq import AwqScheme
from mmserve.quantization.compressed_tensors import CompressedTensorsScheme
from mmserve.quantization.gptq import GptqScheme
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, QuantizationScheme

IN, OUT = 128, 64
EXACT = Placement(torch.float32, torch.device("cpu"))
FAST = Placement(torch.bfloat16, torch.device("cpu"))


def matrix_of(weight: LinearWeight | None, in_features: int = IN) -> torch.Tensor:
    """The matrix itself, float32: its product with each unit vector."""
    assert weight is not None
    return weight.apply(torch.eye(in_features), None).T


def load(scheme: QuantizationScheme, source: StoredMatrices, *names: str, place: Placement = EXACT) -> Any:
    return scheme.load(LinearSpec(names, IN, (OUT,) * len(names)), source, place)


def groups_of(group_size: int) -> torch.Tensor:
    return torch.arange(IN) // group_size


def rounded(exact: torch.Tensor) -> torch.Tensor:
    return exact.float()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_awq(group_size: int, has_zeros: bool) -> None:
    numbers, scales, zeros = random_parts(1, OUT, IN, 4, group_size)
    source = StoredMatrices({"a.qweight": awq_words(numbers.T), "a.scales": scales.T.contiguous()})
    if has_zeros:
        source.tensors["a.qzeros"] = awq_words(zeros.T)
    else:
        zeros = torch.full_like(zeros, 8)
    scheme = AwqScheme({"bits": 4, "group_size": group_size, "version": "gemm"})
    expected = value(numbers, scales, zeros, groups_of(group_size))
    assert torch.equal(matrix_of(load(scheme, source, "a")), rounded(expected))
    assert source.taken == set(source.tensors)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("scatters", [False, True])
def test_gptq(bits: int, stored: str, scatters: bool) -> None:
    numbers, scales, zeros = random_parts(2, OUT, IN, bits, 32)
    groups = groups_of(32)
    if scatters:
        groups = groups[torch.randperm(IN, generator=torch.Generator().manual_seed(3))]
    source = StoredMatrices(
        {
            "a.qweight": gptq_words(numbers.T.contiguous(), bits),
            "a.qzeros": gptq_words((zeros - int(stored == "gptq")).contiguous(), bits).T.contiguous(),
            "a.scales": scales.T.contiguous(),
            "a.g_idx": groups.to(torch.int32),
        }
    )
    scheme = GptqScheme({"bits": bits, "group_size": 32, "desc_act": scatters, "checkpoint_format": stored})
    assert torch.equal(matrix_of(load(scheme, source, "a")), rounded(value(numbers, scales, zeros, groups)))
    assert source.taken == set(source.tensors)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scatters", [False, True])
def test_compressed_tensors(bits: int, symmetric: bool, scatters: bool) -> None:
    numbers, scales, zeros = random_parts(4, OUT, IN, bits, 64)
    groups = groups_of(64)
    source = StoredMatrices(
        {
            "a.weight_packed": compressed_words(numbers, bits),
            "a.weight_scale": scales,
            "a.weight_shape": torch.tensor([OUT, IN]),
        }
    )
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    else:
        source.tensors["a.weight_zero_point"] = compressed_words(zeros, bits, dim=0)
    if scatters:
        groups = groups[torch.randperm(IN, generator=torch.Generator().manual_seed(5))]
        source.tensors["a.weight_g_idx"] = groups.to(torch.int32)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": 64, "strategy": "group"}
    scheme = CompressedTensorsScheme({"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    assert torch.equal(matrix_of(load(scheme, source, "a")), rounded(value(numbers, scales, zeros, groups)))
    assert source.taken == set(source.tensors)


def awq_source(*names: str) -> tuple[StoredMatrices, torch.Tensor]:
    """Matrices in groups of 32, and what they are, stacked."""
    source, matrices = StoredMatrices(), []
    for seed, name in enumerate(names):
        numbers, scales, zeros = random_parts(seed, OUT, IN, 4, 32)
        source.tensors |= {
            f"{name}.qweight": awq_words(numbers.T),
            f"{name}.scales": scales.T.contiguous(),
            f"{name}.qzeros": awq_words(zeros.T),
        }
        matrices.append(value(numbers, scales, zeros, groups_of(32)))
    return source, torch.cat(matrices)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_bfloat16(num_rows: int, has_bias: bool) -> None:
    """Packed for a few rows, dense for more; two matrices as one."""
    source, matrix = awq_source("q", "k")
    weight = load(AwqScheme({"group_size": 32}), source, "q", "k", place=FAST)
    x = torch.randn(num_rows, IN, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(6))
    bias = torch.randn(2 * OUT, dtype=torch.bfloat16) if has_bias else None
    expected = x.double() @ matrix.T + (0.0 if bias is None else bias.double())
    out = weight.apply(x, bias)
    assert out.dtype is torch.bfloat16
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("place", [EXACT, FAST])
def test_orders_that_differ_are_each_their_own(place: Placement) -> None:
    """Rows that were quantized in different orders of their columns cannot be one matrix."""
    source, matrices = StoredMatrices(), []
    for seed, name in enumerate(("q", "k")):
        numbers, scales, zeros = random_parts(seed, OUT, IN, 4, 32)
        groups = groups_of(32)[torch.randperm(IN, generator=torch.Generator().manual_seed(seed))]
        source.tensors |= {
            f"{name}.qweight": gptq_words(numbers.T.contiguous(), 4),
            f"{name}.qzeros": gptq_words((zeros - 1).contiguous(), 4).T.contiguous(),
            f"{name}.scales": scales.T.contiguous(),
            f"{name}.g_idx": groups.to(torch.int32),
        }
        matrices.append(value(numbers, scales, zeros, groups))
    weight = load(GptqScheme({"bits": 4, "group_size": 32}), source, "q", "k", place=place)
    x = torch.randn(3, IN, dtype=place.dtype)
    expected = x.double() @ torch.cat(matrices).T
    assert float((weight.apply(x, None).double() - expected).norm() / expected.norm()) < 1e-2


def test_what_the_checkpoint_leaves_is_left() -> None:
    source, _ = awq_source("q")
    assert load(AwqScheme({"group_size": 32}), source, "head") is None
    assert not source.taken


@pytest.mark.parametrize(
    ("make", "config", "word"),
    [
        (AwqScheme, {"bits": 3}, "3 bits"),
        (AwqScheme, {"bits": 4, "version": "gemv"}, "gemv"),
        (GptqScheme, {"bits": 5}, "5 bits"),
        (GptqScheme, {"bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        (CompressedTensorsScheme, {}, "config_groups"),
        (
            CompressedTensorsScheme,
            {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}}},
            "not served",
        ),
    ],
)
def test_layouts_that_are_not_served_are_named(make: Callable[[Any], Any], config: dict[str, Any], word: str) -> None:
    with pytest.raises(SetupError, match=word) as caught:
        make(config)
    assert caught.value.code == "model_unavailable"
