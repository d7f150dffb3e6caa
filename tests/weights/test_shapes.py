"""Published shapes: what the engine makes of them, and the stand-in tokenizers."""

import asyncio
from collections.abc import Mapping

import pytest
import torch

from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.client import EngineClient
from mmserve.errors import SetupError
from mmserve.request import SamplingParams
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.preprocess import load_processor
from mmserve.weights import shapes
from mmserve.weights.checkpoint import Checkpoint, open_checkpoint
from mmserve.weights.shapes import SHAPES, Shape

# Billions of parameters of the decoder, embedding and head included, as published.
SIZES = {"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-3.1-8b": 8.03, "qwen2.5-7b": 7.62}
QUESTION = [{"type": "image"}, {"type": "text", "text": "Summarise this page in five sentences."}]


def opened(name: str) -> Checkpoint:
    return open_checkpoint(f"shape:{name}", load_format="dummy")


def num_parameters(config: ModelConfig) -> int:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size) + config.qkv_bias * (q_size + 2 * kv_size)
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_layers * layer + tables * config.vocab_size * config.hidden_size + config.hidden_size


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_in_bfloat16_with_ids_for_all_its_tokens(name: str) -> None:
    checkpoint = opened(name)
    config = ModelConfig.from_hf(checkpoint.config)
    assert config.dtype == "bfloat16"
    assert checkpoint.tokenizer().vocab_size <= config.vocab_size
    assert checkpoint.tensor("model.norm.weight", (3,)).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "billions"), SIZES.items())
def test_the_sizes_are_the_published_ones(name: str, billions: float) -> None:
    assert num_parameters(ModelConfig.from_hf(opened(name).config)) / 1e9 == pytest.approx(billions, abs=0.006)


def test_qwen_s_special_tokens_have_their_published_ids() -> None:
    tokenizer = opened("qwen2.5-vl-7b").tokenizer()
    ids = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|vision_start|>": 151652, "<|image_pad|>": 151655}
    assert {token: tokenizer.encode(token) for token in ids} == {token: [number] for token, number in ids.items()}
    assert tokenizer.eos_token_ids == (151645,)


@pytest.mark.parametrize(
    ("name", "num_tokens"), [("qwen2.5-vl-7b", 2831), ("qwen3-vl-8b", 2204), ("llava-1.5-7b", 632)]
)
def test_a_page_and_a_question_take_as_many_tokens_as_are_published(name: str, num_tokens: int) -> None:
    checkpoint = opened(name)
    tokenizer = checkpoint.tokenizer()
    processor = load_processor(checkpoint, tokenizer)
    assert processor is not None
    ids = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    assert ids.count(processor.image_token_id) == 1
    assert len(ids) - 1 + processor.plan(1240, 1754, PixelLimits()).num_tokens == num_tokens


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen2.5-7b"])
def test_any_text_comes_back_and_other_ids_are_words(name: str) -> None:
    tokenizer = opened(name).tokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve 東京")) == "naïve 東京"
    words = [tokenizer.token_text(token_id) for token_id in range(256, SHAPES[name].first_special_id)]
    assert len(set(words)) == len(words)
    assert words[:2] == [" aaaa", " aaab"]


def test_gains_of_norms_are_ones_whatever_their_names() -> None:
    checkpoint = opened("qwen2.5-vl-7b")
    for name in ("vision.blocks.0.norm1.weight", "vision.merger.ln_q.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(checkpoint.tensor(name, (8,)), torch.ones(8, dtype=torch.bfloat16))
    assert checkpoint.tensor("vision.blocks.0.attn.qkv.bias", (8,)).abs().max() < 0.5


def test_a_shape_without_dummy_weights_says_what_to_add() -> None:
    with pytest.raises(SetupError, match="--load-format dummy"):
        open_checkpoint("shape:llama-2-7b")


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(SetupError, match="shape:llama-2-7b, "):
        open_checkpoint("shape:llama-9", load_format="dummy")


def test_an_engine_runs_a_shape_without_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Mapping[str, object] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}
    shape = Shape(config={**SHAPES["llama-2-7b"].config, **small, **heads}, first_special_id=300)
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": shape})
    cache = CacheConfig(memory_bytes=2**20)
    client = EngineClient.start(EngineConfig(model="shape:tiny", load_format="dummy", cache=cache))
    try:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (completion,) = asyncio.run(client.complete([5, 6], params))
    finally:
        client.close()
    assert len(completion.token_ids) == 3
