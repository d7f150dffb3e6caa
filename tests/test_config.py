"""Configuration: sizes, limits, and the shapes that transformers 4 and 5 write."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, parse_bytes, parse_duration
from mmserve.errors import RequestError, SetupError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
OLD_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("2GiB", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("64 kib", 65536),
        (" 3 kB ", 3000),
        ("7b", 7),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "two", "2 TiBs", "1.2.3GiB", "nan", "inf", "1e999", "2Gi"])
def test_parse_bytes_says_how_to_write_a_size(text: str) -> None:
    with pytest.raises(RequestError, match="2GiB") as caught:
        parse_bytes(text)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("30 m", 1800), (" 7D ", 7 * 24 * 3600)]
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "0", "-1d", "nan", "inf", "7 days", "1w"])
def test_parse_duration_says_how_to_write_a_time(text: str) -> None:
    with pytest.raises(RequestError, match="7d"):
        parse_duration(text)


def test_transformers_4_and_5_files_of_one_model_read_alike() -> None:
    old = model(rope_theta=500000.0, rope_scaling=OLD_LLAMA3_SCALING, torch_dtype="bfloat16")
    new = model(rope_parameters={"rope_theta": 500000.0, **OLD_LLAMA3_SCALING}, dtype="bfloat16")
    assert old == new
    assert new.rope.theta == 500000.0
    assert new.rope.scaling == OLD_LLAMA3_SCALING
    assert new.dtype == "bfloat16"


def test_a_default_rope_has_no_scaling() -> None:
    old, new = (
        model(rope_theta=1e6, rope_scaling=None),
        model(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    )
    assert old == new
    assert new.rope.theta == 1e6
    assert new.rope.scaling is None
    assert model().rope.theta == 10000.0


def test_the_oldest_scalings_call_their_kind_type() -> None:
    scaling = model(rope_scaling={"type": "linear", "factor": 2.0}).rope.scaling
    assert scaling is not None
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 2.0)


def test_a_scaling_without_its_original_length_takes_the_models_as_transformers_does() -> None:
    scaling = model(rope_scaling={"type": "yarn", "factor": 4.0}).rope.scaling
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] == 4096
    inferred = model(rope_scaling={"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024})
    assert inferred.rope.scaling is not None
    assert inferred.rope.scaling["factor"] == 4.0


def test_reading_does_not_change_the_dictionary() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0}
    model(rope_parameters=rope)
    assert rope == {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0}


def test_heads_follow_from_what_is_given() -> None:
    assert model().head_dim == 8
    assert model(head_dim=32).head_dim == 32
    assert model(head_dim=None).head_dim == 8
    assert model().num_kv_heads == 2
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert ModelConfig.from_hf(without).num_kv_heads == 8


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = model(model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = model(model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    llama = model(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)


@pytest.mark.parametrize(
    ("fields", "window", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, 1024, 1024),
        ({"model_type": "mistral", "sliding_window": None}, None, 4096),
        ({"model_type": "mistral", "sliding_window": 9999}, 9999, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}, None, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, 1024, 1024),
        ({"model_type": "llama", "sliding_window": 1024}, None, 4096),
    ],
    ids=str,
)
def test_a_sliding_window_bounds_the_context(fields: dict[str, Any], window: int | None, context: int) -> None:
    config = model(**fields)
    assert config.sliding_window == window
    assert config.max_context == context


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, [3, 2, 4], (2, 3, 4)),
        (None, 0, (0,)),
    ],
)
def test_end_of_sequence_ids_come_from_both_files(own: Any, generation: Any, ids: tuple[int, ...]) -> None:
    config = ModelConfig.from_hf({**LLAMA, "eos_token_id": own}, {"eos_token_id": generation})
    assert config.eos_token_ids == ids


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(SetupError, match=name) as caught:
        ModelConfig.from_hf({key: value for key, value in LLAMA.items() if key != name})
    assert caught.value.code == "model_unavailable"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_what_would_change_every_answer_is_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(SetupError, match=name):
        model(**fields)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: CacheConfig(block_size=0), "--block-size"),
        (lambda: CacheConfig(memory_bytes=0), "--kv-cache-memory-bytes"),
        (lambda: CacheConfig(memory_utilization=0.0), "--gpu-memory-utilization"),
        (lambda: CacheConfig(memory_utilization=1.1), "--gpu-memory-utilization"),
        (lambda: CacheConfig(memory_utilization=math.nan), "--gpu-memory-utilization"),
        (lambda: SchedulerConfig(max_num_seqs=0), "--max-num-seqs"),
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "--max-num-batched-tokens"),
        (lambda: SchedulerConfig(max_num_waiting=0), "--max-num-waiting"),
        (lambda: EngineConfig(max_model_len=1), "--max-model-len"),
        (lambda: EngineConfig(num_threads=0), "--num-threads"),
    ],
)
def test_a_bad_option_is_named(make: Callable[[], object], option: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert str(caught.value).startswith(f"{option} ")
    assert caught.value.param == option.removeprefix("--")


@pytest.mark.parametrize(
    ("device", "has_driver", "limits"),
    [
        ("cpu", False, (64, 2048)),
        ("cpu", True, (64, 2048)),
        ("cuda", False, (256, 8192)),
        ("cuda:1", False, (256, 8192)),
        ("auto", False, (64, 2048)),
        ("auto", True, (256, 8192)),
    ],
)
def test_a_device_has_usual_limits(
    device: str, has_driver: bool, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.config._has_nvidia_driver", lambda: has_driver)
    scheduler = SchedulerConfig.for_device(device)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == limits
    others = replace(scheduler, max_num_seqs=64, max_num_batched_tokens=2048)
    assert others == SchedulerConfig(), "nothing else depends on the device"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_given_limits_win_one_by_one(device: str) -> None:
    usual = SchedulerConfig.for_device(device)
    assert SchedulerConfig.for_device(device, max_num_seqs=3) == replace(usual, max_num_seqs=3)
    assert SchedulerConfig.for_device(device, max_num_batched_tokens=5) == replace(usual, max_num_batched_tokens=5)
    assert SchedulerConfig.for_device(device, max_num_waiting=7) == replace(usual, max_num_waiting=7)
    assert SchedulerConfig.for_device(device, max_num_seqs=999).max_num_seqs == 999
    with pytest.raises(RequestError, match="--max-num-seqs"):
        SchedulerConfig.for_device(device, max_num_seqs=0)


def test_names_under_which_a_model_is_served() -> None:
    assert EngineConfig(model="m").names == ("m",)
    assert EngineConfig(model="m", served_model_name=("a", "b")).names == ("a", "b")
