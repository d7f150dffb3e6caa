"""Tiny random Hugging Face checkpoints of every family, to compare tokens and logits with transformers.

Weights are drawn wide, norms and biases included, so that a wrong position or a layer left out changes the tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MATRIX_STD = 0.15
VECTOR_STD = 0.2
VOCAB_SIZE = 400
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The invoice of 12 March is due within 30 days; the total is 1,284.50 EUR including tax.",
    "Page after page the report says that sales rose, that costs fell, and that nobody knows why.",
    "Dear Sir or Madam, thank you for the letter. Please find the table of the results attached.",
    "Überweisung, façade, naïve, 東京, Привет: text of the world in a few letters, {'json': [1, 2, 3]}\n\n\tend.",
)
_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
_LLAMA3_ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
)
# family -> (transformers' configuration class, what it has beyond the common shape)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaConfig", {"rope_theta": 10000.0}),
        "llama3": ("LlamaConfig", {"rope_parameters": dict(_LLAMA3_ROPE)}),
        "mistral": ("MistralConfig", {"sliding_window": 256, "head_dim": 16}),
        "smollm2": ("LlamaConfig", {"rope_theta": 100000.0, "num_attention_heads": 6, "hidden_size": 96}),
        "qwen2": ("Qwen2Config", {"rope_theta": 1000000.0}),
        "qwen3": ("Qwen3Config", {"rope_theta": 1000000.0, "head_dim": 32}),
    }
)
TIED_BY_NATURE = frozenset({"smollm2"})


def save_reference_model(
    family: str,
    folder: Path,
    *,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a random checkpoint with tokenizer and chat template into `folder`, and return it.

    `family` is a key of `FAMILIES`; `tied` ties the embeddings (the family's habit if None); `max_shard_size="100KB"`
    gives several files; `overrides` are configuration fields (`num_hidden_layers=1`).
    """
    from transformers import AutoModelForCausalLM

    config = _configuration(family, tied=family in TIED_BY_NATURE if tied is None else tied, overrides=overrides)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    _randomize(model, seed)
    model.save_pretrained(str(folder), max_shard_size=max_shard_size)
    save_reference_tokenizer(folder)
    return folder


def save_reference_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with three special tokens and a ChatML template, as transformers saves it."""
    from transformers import PreTrainedTokenizerFast

    end_of_text, start, end = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(), bos_token=start, eos_token=end, unk_token=end_of_text, pad_token=end_of_text
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))


def load_reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of `folder`, in evaluation mode, with its plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager").eval()


def _configuration(family: str, *, tied: bool, overrides: Mapping[str, Any]) -> Any:
    import transformers

    class_name, own = FAMILIES[family]
    fields = {**_SHAPE, **own, "tie_word_embeddings": tied, **overrides}
    return getattr(transformers, class_name)(**fields)


def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            std = MATRIX_STD if parameter.ndim > 1 else VECTOR_STD
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer
