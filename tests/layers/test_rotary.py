"""Rotary frequencies equal transformers', scaling by scaling."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mmserve.config import ModelConfig, RopeConfig
from mmserve.errors import SetupError
from mmserve.kernels.reference import apply_rotary
from mmserve.layers.rotary import RotaryTable, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 8},
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "high_freq_factor": 16.0},
    {**LLAMA3, "original_max_position_embeddings": 64},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "factor": 40.0, "beta_fast": 64.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    {**YARN, "mscale": 0.707},
    {**YARN, "beta_fast": None, "attention_factor": None},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    {**YARN, "original_max_position_embeddings": 16},
]
SHAPES = [(64, 10000.0), (128, 1000000.0), (16, 500000.0)]


def hf_config(scaling: dict[str, Any], head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={**scaling, "rope_theta": theta},
    )


def own_config(scaling: dict[str, Any], head_dim: int, theta: float) -> RopeConfig:
    """Read as from a file, which is where what is left out gets its value."""
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 8
    )
    parameters = {**scaling, "rope_theta": theta}
    return ModelConfig.from_hf({**sizes, "max_position_embeddings": 4096, "rope_parameters": parameters}).rope


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), SHAPES)
def test_frequencies_equal_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    config = hf_config(scaling, head_dim, theta)
    if scaling["rope_type"] == "default":
        expected, magnitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found, own_magnitude = inverse_frequencies(own_config(scaling, head_dim, theta), head_dim)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0.0)
    assert own_magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS[1:4] + SCALINGS[6:7], ids=str)
def test_a_scaling_changes_something(scaling: dict[str, Any]) -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=1e4), 64)
    scaled, _ = inverse_frequencies(own_config(scaling, 64, 1e4), 64)
    assert not torch.equal(plain, scaled)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_an_unknown_scaling_is_refused(kind: str) -> None:
    with pytest.raises(SetupError, match=kind) as caught:
        inverse_frequencies(RopeConfig(scaling={"rope_type": kind, "factor": 2.0}), 64)
    assert caught.value.code == "model_unavailable"


@pytest.mark.parametrize(
    ("scaling", "missing"),
    [({"rope_type": "linear"}, "factor"), ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor")],
    ids=str,
)
def test_a_parameter_that_is_missing_is_named(scaling: dict[str, Any], missing: str) -> None:
    with pytest.raises(SetupError, match=missing):
        inverse_frequencies(RopeConfig(scaling=scaling), 64)


@pytest.mark.parametrize("scaling", [SCALINGS[0], LLAMA3, YARN], ids=str)
def test_the_table_rotates_as_transformers_does(scaling: dict[str, Any]) -> None:
    positions = torch.tensor([0, 1, 7, 4095, 100, 7])
    q, k = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    table = RotaryTable(
        own_config(scaling, 64, 1e4), head_dim=64, max_positions=4096, dtype=torch.float32, device=torch.device("cpu")
    )
    cos, sin = table.at(positions)
    assert cos.shape == sin.shape == (6, 1, 64)
    embedding = LlamaRotaryEmbedding(hf_config(scaling, 64, 1e4))
    hf_cos, hf_sin = embedding(q, positions[None])
    # transformers' heads stand before the positions.
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], hf_cos, hf_sin)
    torch.testing.assert_close(apply_rotary(q, cos, sin), expected_q[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(apply_rotary(k, cos, sin), expected_k[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_the_table_is_computed_in_float32_whatever_it_is_kept_in() -> None:
    """In bfloat16, position 4095 would be 4096."""
    config, cpu = RopeConfig(theta=1e4), torch.device("cpu")
    tables = SimpleNamespace(
        full=RotaryTable(config, head_dim=64, max_positions=4096, dtype=torch.float32, device=cpu),
        half=RotaryTable(config, head_dim=64, max_positions=4096, dtype=torch.bfloat16, device=cpu),
    )
    positions = torch.tensor([4095])
    for full, half in zip(tables.full.at(positions), tables.half.at(positions), strict=True):
        assert half.dtype is torch.bfloat16
        assert torch.equal(full.bfloat16(), half)
