"""Random weights at the shape of a configuration, for speed runs: nothing is read but the configuration."""

import itertools
import string
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from mmserve.config import QuantizationName
from mmserve.errors import SetupError
from mmserve.weights.checkpoint import QuantizedTensor
from mmserve.weights.shapes import PLAIN_TEMPLATE, Shape
from mmserve.weights.token_stream import byte_level_alphabet
from mmserve.weights.tokenizer import Tokenizer

_STANDARD_DEVIATION = 0.02
# Tensors are cut from one pool of random numbers (64 MiB in bfloat16): drawing 7 billion of them takes minutes.
_POOL_SIZE = 1 << 25
_INT4_SCALE = 0.005
# At four standard deviations.
_LARGEST_NUMBER = 100
_DECODER_LAYERS = "model.layers."
# By the method's name: how tensors end that a quantized matrix has.
_STORED_PARTS: Mapping[str | None, tuple[str, ...]] = {
    "awq": (".qweight", ".qzeros", ".scales"),
    "gptq": (".qweight", ".qzeros", ".scales"),
    "fp8": (".weight_scale",),
    "compressed-tensors": (".weight_scale",),
}


_INT8_CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def stored_as(quantization: QuantizationName) -> dict[str, Any]:
    """What a `config.json` has in addition: AWQ and GPTQ of four bits in groups of 128, FP8, or W8A8 in INT8."""
    if quantization not in _STORED_PARTS:
        return {}
    if quantization == "fp8":
        return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    if quantization == "compressed-tensors":
        group = {"weights": _INT8_CHANNELS, "input_activations": _INT8_TOKENS, "targets": ["Linear"]}
        return {"quantization_config": {"quant_method": quantization, "config_groups": {"group_0": group}}}
    return {"quantization_config": {"quant_method": quantization, "bits": 4, "group_size": 128}}


class DummyCheckpoint:
    """A `Checkpoint` that makes up every tensor it is asked for; the same for the same seed and name, in any order."""

    def __init__(
        self,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tokenizer: Callable[[], Tokenizer],
        processor_config: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.processor_config = processor_config or {}
        self._make_tokenizer = tokenizer
        self._seed = seed
        self._device = torch.device(device)
        self._dtype = _dtype_of(config)
        self._pool: torch.Tensor | None = None

    def tokenizer(self) -> Tokenizer:
        return self._make_tokenizer()

    def names(self) -> frozenset[str]:
        return frozenset()

    def has(self, name: str) -> bool:
        return name.startswith(_DECODER_LAYERS) and name.endswith(_STORED_PARTS.get(self._method, ()))

    def stored_name(self, name: str) -> str:
        return name

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        if name.endswith(".weight_scale"):
            return torch.full(shape or (1,), self._scale, device=self._device)
        if shape is None:
            raise SetupError("model_unavailable", f"dummy weights need to be told the shape of {name}")
        # A vector that scales is a norm's gain.
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".scales"):
            return torch.full(shape, _INT4_SCALE, dtype=torch.float16, device=self._device)
        if name.endswith((".qweight", ".qzeros")):
            # Zero points in the middle: weights of both signs.
            zeros = name.endswith(".qzeros")
            words = (torch.full(shape, 0x77777777) if zeros else torch.randint(-(2**31), 2**31, shape)).to(torch.int32)
            return words.to(self._device)
        weight = self._from_pool(name, shape)
        # Numbers for the scale above; a cast would make zeros of all.
        is_stored = self.has(f"{name}_scale") and len(shape) > 1
        if not is_stored:
            return weight
        numbers = weight.div_(self._scale).round_().clamp_(-127, 127)
        return numbers.to(torch.float8_e4m3fn if self._method == "fp8" else torch.int8)

    @property
    def _method(self) -> str | None:
        method: str | None = self.config.get("quantization_config", {}).get("quant_method")
        return method

    @property
    def _scale(self) -> float:
        return 4 * _STANDARD_DEVIATION / _LARGEST_NUMBER

    def quantized(self, name: str) -> QuantizedTensor | None:  # noqa: ARG002
        return None

    def _from_pool(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        pool = self._random_pool()
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        flat = tensor.view(-1)
        start = zlib.crc32(f"{self._seed}/{name}".encode()) % _POOL_SIZE
        done = 0
        while done < flat.numel():
            count = min(_POOL_SIZE - start, flat.numel() - done)
            flat[done : done + count] = pool[start : start + count]
            done, start = done + count, 0
        return tensor

    def _random_pool(self) -> torch.Tensor:
        if self._pool is None:
            generator = torch.Generator(self._device).manual_seed(self._seed)
            pool = torch.empty(_POOL_SIZE, dtype=self._dtype, device=self._device)
            self._pool = pool.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        return self._pool


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16


def byte_level_tokenizer() -> Tokenizer:
    """A stand-in where a configuration comes without a tokenizer: one token a byte, no special tokens."""
    return Tokenizer(_byte_level_backend(256), chat_template=PLAIN_TEMPLATE)


def shape_tokenizer(shape: Shape) -> Tokenizer:
    """Reads text as one token a byte, shows any other id as a word of its own; special tokens have their own ids."""
    backend = _byte_level_backend(shape.first_special_id)
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in shape.special_tokens]
    backend.add_special_tokens(special)
    return Tokenizer(backend, chat_template=shape.chat_template, special_tokens=shape.named_tokens)


def _byte_level_backend(vocab_size: int) -> tokenizers.Tokenizer:
    vocab = byte_level_alphabet()
    space = next(character for character, byte in vocab.items() if byte == ord(" "))
    words = map("".join, itertools.product(space, *[string.ascii_lowercase] * 4))
    vocab |= {word: token_id for token_id, word in zip(range(len(vocab), vocab_size), words, strict=False)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
