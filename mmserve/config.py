"""Configuration: frozen, nested, validated once. `ModelConfig` is a decoder's shape, read from a Hugging Face file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmserve.errors import RequestError, SetupError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
QuantizationName = Literal["auto", "awq", "gptq", "fp8", "compressed-tensors"]
KVCacheDTypeName = Literal["auto", "fp8"]
DenseCopyName = Literal["auto", "keep", "never"]
VisionAttentionName = Literal["auto", "torch", "triton", "xformers"]
LogFormat = Literal["text", "json"]
PixelsOnName = Literal["auto", "worker", "device"]
GIB = 1024**3


def parse_bytes(text: str) -> int:
    """`2GiB`, `512MiB`, `1.5GB`, `4096` -> bytes."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise RequestError(
            "invalid_request", f"{text!r} is not a size: write 2GiB, 512MiB or a number of bytes"
        ) from None


def parse_duration(text: str) -> float:
    """`7d`, `12h`, `30m`, `90s`, `90` -> seconds."""
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
    number = text.strip().rstrip("smhdSMHD ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        seconds = float(number) * units[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError("invalid_request", f"{text!r} is not a time: write 7d, 12h, 30m or a number of seconds")
    return seconds


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, and the scaling dictionary of the checkpoint (`rope_type` and its parameters) if any."""

    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model, whatever file it came from.

    With a vision tower: `vision` is the checkpoint's `vision_config`, `multimodal` its whole `config.json`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    vision: Mapping[str, Any] | None = None
    multimodal: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """From the dictionaries of `config.json` (transformers 4 or 5) and `generation_config.json`.

        Raises `SetupError` (`model_unavailable`) naming a field that is missing or not supported.
        """
        try:
            return _from_hf(config, generation_config or {})
        except KeyError as error:
            raise SetupError(
                "model_unavailable", f"config.json has no {error.args[0]!r}: is it a decoder model?"
            ) from None

    @property
    def num_matrix_weights(self) -> int:
        """Weights of the layers' matrices and of the output layer."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def max_context(self) -> int:
        """Positions that attention over the whole context serves faithfully (a sliding window bounds it)."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


# Decoders whose positions have three axes: what a configuration leaves out. Qwen3-VL interleaves whatever it says.
_MULTI_AXIS_ROPE: Mapping[str, RopeConfig] = {
    "qwen2_vl": RopeConfig(theta=1e6, scaling={"mrope_section": (16, 24, 24), "mrope_interleaved": False}),
    "qwen2_5_vl": RopeConfig(theta=1e6, scaling={"mrope_section": (16, 24, 24), "mrope_interleaved": False}),
    "qwen3_vl": RopeConfig(theta=5e5, scaling={"mrope_section": (24, 20, 20), "mrope_interleaved": True}),
}

# What sparse text configurations inside vision-language checkpoints leave to their family's defaults.
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
    },
}


def _from_hf(outer: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    architecture = (outer.get("architectures") or ["?"])[0]
    vision = outer.get("vision_config")
    config = _text_config(outer) if vision else outer
    _check_supported(config)
    num_heads = config["num_attention_heads"]
    uses_window = config.get("use_sliding_window", config.get("model_type") == "mistral")
    qkv_bias = config.get("attention_bias", False) or config.get("model_type") == "qwen2"
    return ModelConfig(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config, _MULTI_AXIS_ROPE.get(outer.get("model_type", ""))),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=has_tied_embeddings(outer),
        qkv_bias=qkv_bias,
        o_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        qk_norm=config.get("model_type") == "qwen3",
        sliding_window=config.get("sliding_window") if uses_window else None,
        dtype=_dtype(outer, config),
        eos_token_ids=_token_ids(config.get("eos_token_id"), generation_config.get("eos_token_id")),
        vision=vision,
        multimodal=outer if vision else {},
    )


def _text_config(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of a vision-language configuration: nested (`text_config`), or flat as Qwen2-VL's was."""
    text = {key: value for key, value in (outer.get("text_config") or outer).items() if value is not None}
    kind = str(text.get("model_type", "llama")).removesuffix("_text").replace("_vl", "").replace("2_5", "2")
    shared = {"eos_token_id": outer.get("eos_token_id")}
    return {**_FAMILY_DEFAULTS.get(kind, {}), **shared, **text, "model_type": kind}


def has_tied_embeddings(config: Mapping[str, Any]) -> bool:
    """Whether `config.json` says, at its top or of its text part, that the head is the embedding."""
    return any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {}))


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuse what would change every answer if it were passed over."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotary_share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise SetupError(
            "model_unavailable", f"hidden_act {activation!r} of config.json is not supported: only silu is"
        )
    if rotary_share != 1.0:
        raise SetupError("model_unavailable", f"partial_rotary_factor {rotary_share} of config.json is not supported")


def _rope(config: Mapping[str, Any], multi_axis: RopeConfig | None) -> RopeConfig:
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    default_theta = multi_axis.theta if multi_axis else 10000.0
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    kind = parameters.setdefault("rope_type", parameters.get("type", "default"))
    if multi_axis and multi_axis.scaling:
        kind = parameters["rope_type"] = "default" if kind == "mrope" else kind
        parameters = {**multi_axis.scaling, **parameters, "mrope_interleaved": multi_axis.scaling["mrope_interleaved"]}
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings")
        original = original or parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
        parameters["original_max_position_embeddings"] = original
        parameters["factor"] = parameters.get("factor") or config["max_position_embeddings"] / original
    is_plain = kind == "default" and multi_axis is None
    return RopeConfig(theta=float(theta), scaling=None if is_plain else parameters)


def _dtype(*configs: Mapping[str, Any]) -> str:
    """The first that is named: a text part may name the precision of the decoder that it was trained from."""
    named = [config.get("dtype") or config.get("torch_dtype") for config in configs]
    return str(next(filter(None, named), "float32")).removeprefix("torch.")


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += [] if value is None else [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV cache: `memory_bytes` if given, else `memory_utilization` of the device's total, capped by what is free.

    With neither, a GPU gives 0.9 of its memory and a CPU 2 GiB. `dtype` is that of computation (auto), or FP8 (E4M3).
    """

    block_size: int = 16
    memory_bytes: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    dtype: KVCacheDTypeName = "auto"

    def __post_init__(self) -> None:
        _check(self.block_size >= 1, "block-size", "must be at least 1")
        _check(self.memory_bytes is None or self.memory_bytes > 0, "kv-cache-memory-bytes", "must be positive")
        utilization = self.memory_utilization
        _check(utilization is None or 0.0 < utilization <= 1.0, "gpu-memory-utilization", "must be above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the waiting queue; the defaults are a CPU's.

    A step encodes images of up to `max_encoder_tokens` tokens; the encoder cache keeps `encoder_cache_tokens`.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 4096
    max_encoder_tokens: int = 8192
    encoder_cache_tokens: int = 32768

    def __post_init__(self) -> None:
        _check(self.max_num_seqs >= 1, "max-num-seqs", "must be at least 1")
        _check(self.max_num_batched_tokens >= 1, "max-num-batched-tokens", "must be at least 1")
        _check(self.max_num_waiting >= 1, "max-num-waiting", "must be at least 1")
        _check(self.max_encoder_tokens >= 1, "max-encoder-tokens", "must be at least 1")
        _check(self.encoder_cache_tokens >= 1, "encoder-cache-tokens", "must be at least 1")

    @classmethod
    def for_device(
        cls, device: str, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None, **fields: int
    ) -> "SchedulerConfig":
        """With what the device (`auto`, `cpu`, `cuda:0`) can bear where nothing is given."""
        on_gpu = device.startswith("cuda") or (device == "auto" and _has_nvidia_driver())
        usual_seqs, usual_tokens = (256, 8192) if on_gpu else (cls.max_num_seqs, cls.max_num_batched_tokens)
        return cls(
            max_num_seqs=usual_seqs if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=usual_tokens if max_num_batched_tokens is None else max_num_batched_tokens,
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How pictures are encoded: what computes the encoder's attention, and where pictures are scaled and cut.

    `pixels_on` is `worker` for the preprocessing processes, `device` for the engine's device; `auto` is the device
    where that is a GPU.
    """

    attention: VisionAttentionName = "auto"
    pixels_on: PixelsOnName = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with. `use_process` puts it in a process of its own, otherwise it is a thread.

    `quantization` is as the checkpoint says (auto), or `fp8` for one in full precision. `dense_copy` says whether
    quantized weights are there in 16 bits too, which is faster for many rows: auto is where memory is plentiful, never
    also saves memory before time. `async_scheduling` prepares a step while the one before it runs; None does so on a
    GPU. `enforce_eager` does without CUDA graphs, and without recorded steps on a CPU. A process that dies is started
    again `max_engine_restarts` times in ten minutes at most; one that gives no sign of life for `engine_timeout`
    seconds, in which every step should end, is ended.
    """

    model: str = "smollm2-135m"
    served_model_name: tuple[str, ...] = ()
    dtype: DTypeName = "auto"
    load_format: LoadFormat = "auto"
    quantization: QuantizationName = "auto"
    dense_copy: DenseCopyName = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    num_threads: int | None = None
    use_process: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    max_engine_restarts: int = 5
    engine_timeout: float = 600.0
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        _check(self.max_model_len is None or self.max_model_len >= 2, "max-model-len", "must be at least 2")
        _check(self.num_threads is None or self.num_threads >= 1, "num-threads", "must be at least 1")
        _check(self.max_engine_restarts >= 0, "max-engine-restarts", "must not be negative")
        _check(self.engine_timeout > 0, "engine-timeout", "must be above 0")

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which clients may ask for this model; the first is the one that answers carry."""
        return self.served_model_name or (self.model,)


def _has_nvidia_driver() -> bool:
    """A guess that costs nothing; loading torch to know for certain takes seconds."""
    return Path("/dev/nvidiactl").exists()


def _check(condition: bool, option: str, sentence: str) -> None:
    if not condition:
        raise RequestError("invalid_request", f"--{option} {sentence}", param=option)
