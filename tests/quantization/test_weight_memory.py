"""Memory of weights beside what the format takes, at its smallest (`--dense-copy never`) and with a copy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config
from gguf_models import KINDS, blocks_of, save_blocks
from reference_models import save_reference_model
from stored_matrices import StoredMatrices, awq_words, compressed_words, gptq_words, random_parts
from stored_models import FORMS

from mmserve.config import DenseCopyName
from mmserve.engine.engine import Engine
from mmserve.engine.memory import tensor_bytes
from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.registry import choose_scheme
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement
from mmserve.weights.gguf_header import read_header

IN, OUT = 512, 256
CPU = torch.device("cpu")
SMALL = Placement(torch.bfloat16, CPU, keeps_copy=False, is_small=True)
SHORT = Placement(torch.bfloat16, CPU, keeps_copy=False)
WITH_COPY = Placement(torch.bfloat16, CPU)
DENSE_COPIES: tuple[DenseCopyName, ...] = ("never", "keep")
# At its smallest, of what the format takes.
MOST = 1.05
# Without a copy where memory is short, but not saved at the cost of speed.
BLOCKS_AS_PAIRS = {"Q4_0": 1.112, "Q4_1": 1.0, "Q5_0": 1.637, "Q5_1": 1.5, "Q8_0": 1.059, "Q4_K": 1.112}
BLOCKS_AS_PAIRS |= {"Q5_K": 1.637, "Q6_K": 1.524}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks(kind: str) -> None:
    data, _ = blocks_of(kind, OUT, IN)
    small, short = (tensor_bytes(grouped_weight([grouped_ints(data, kind)], place)) for place in (SMALL, SHORT))
    assert 1.0 <= small / data.nbytes < MOST
    assert short / data.nbytes == pytest.approx(BLOCKS_AS_PAIRS[kind], abs=1e-3)


def loaded(form: str, placement: Placement) -> tuple[LinearWeight, int]:
    """A matrix in `form`, and the bytes of its tensors."""
    parts, _ = FORMS[form].store(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)))
    source = StoredMatrices({f"a.{name}": tensor.contiguous() for name, tensor in parts.items()})
    scheme = choose_scheme({"quantization_config": FORMS[form].config}, "auto")
    assert scheme is not None
    weight = scheme.load(LinearSpec(("a",), IN, (OUT,)), source, placement)
    assert weight is not None
    return weight, sum(tensor.nbytes for tensor in source.tensors.values())


@pytest.mark.parametrize("form", FORMS)
def test_stored_forms(form: str) -> None:
    """Groups are of 32 where there are groups; GPTQ's places of columns in their own order are not held."""
    weight, num_bytes = loaded(form, SMALL)
    assert 0.94 < tensor_bytes(weight) / num_bytes < MOST


@pytest.mark.parametrize("form", ["w8a16", "fp8 w8a8", "fp8 blocks"])
def test_int8_and_fp8_are_not_held_beside_their_copy(form: str) -> None:
    weight, _ = loaded(form, WITH_COPY)
    assert tensor_bytes(weight) / (2 * IN * OUT) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, IN])
@pytest.mark.parametrize(
    ("method", "bits"),
    [("awq", 4), *((method, bits) for method in ("gptq", "symmetric", "asymmetric") for bits in (2, 3, 4, 8))],
)
def test_groups(method: str, bits: int, group_size: int) -> None:
    """Those of a whole row are several of the product's."""
    tensors, config = _in_groups(method, bits, group_size)
    source = StoredMatrices({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()})
    scheme = choose_scheme({"quantization_config": config}, "auto")
    assert scheme is not None
    weight = scheme.load(LinearSpec(("a",), IN, (OUT,)), source, SMALL)
    assert 1.0 <= tensor_bytes(weight) / sum(tensor.nbytes for tensor in source.tensors.values()) < MOST


def _in_groups(method: str, bits: int, group_size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    numbers, scales, zeros = random_parts(0, OUT, IN, bits, group_size)
    config: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size}
    if method == "awq":
        return {"qweight": awq_words(numbers.T), "qzeros": awq_words(zeros.T), "scales": scales.T}, config
    if method == "gptq":
        qweight, qzeros = gptq_words(numbers.T.contiguous(), bits), gptq_words(zeros - 1, bits).T
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}, config
    tensors = {"weight_packed": compressed_words(numbers, bits), "weight_scale": scales}
    if method == "asymmetric":
        tensors["weight_zero_point"] = compressed_words(zeros, bits, dim=0)
    weights = {"num_bits": bits, "strategy": "group", "group_size": group_size, "symmetric": method == "symmetric"}
    group = {"weights": weights, "targets": ["Linear"]}
    return tensors, {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file(kind: str, tmp_path: Path) -> None:
    """Embeddings stay in the file's blocks, biases and norms are bfloat16."""
    full = save_reference_model(
        "qwen2", tmp_path / "full", hidden_size=256, intermediate_size=512, num_hidden_layers=2, tied=False
    )
    file = save_blocks(full, tmp_path / "model.gguf", kind)
    num_bytes = sum(tensor.num_bytes for tensor in read_header(file).tensors)
    small, large = (
        Engine(replace(engine_config(file), dtype="bfloat16", dense_copy=dense_copy))._runner.num_weight_bytes
        for dense_copy in DENSE_COPIES
    )
    assert 0.98 < small / num_bytes < MOST
    assert large > 1.5 * small
