from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TokenType
from packaging.version import Version
from reference_gguf import save_reference_gguf
from reference_models import save_reference_model, save_reference_tokenizer

from mmserve.errors import SetupError
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.gguf_header import read_header
from mmserve.weights.gguf_tokenizer import build_tokenizer
from mmserve.weights.model_files import read_tokenizer

TEXTS = [
    "Hello world, don't we'll I'VE",
    "  leading   spaces\n\n\ttabs\r\n\r\n a\r\n",
    "Invoice No. 20241129 of 1,234.56 EUR/day",
    "naïve façade 東京 Привет 👩‍👩‍👧 \u00a0x",
    "def f(x):\n    return x**2  # CamelCase/slash\n",
    "<|im_start|>user\nhi<|im_end|>",
    " " * 30 + "x",
]
# Before 5.18, transformers takes every pre-tokenizer for GPT-2's.
COMPARABLE = [
    "gpt-2",
    *(["llama-bpe", "qwen2", "tekken"] if Version(version("transformers")) >= Version("5.18") else []),
]
MESSAGES = [{"role": "user", "content": "Page 1 says: naïve 東京"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("hf"), num_hidden_layers=1)


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "ab",
        "<t>",
    ]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 5]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0, 0.0],
        "tokenizer.ggml.token_type": [*types, TokenType.USER_DEFINED],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | changes


def test_it_is_the_tokenizer_of_the_original_folder(folder: Path, tmp_path: Path) -> None:
    original = read_tokenizer(folder)
    rebuilt = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "model.gguf"))).tokenizer()
    for text in TEXTS:
        for parse_special in (True, False):
            ids = original.encode(text, parse_special=parse_special)
            assert rebuilt.encode(text, parse_special=parse_special) == ids
        assert rebuilt.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    assert rebuilt.encode_chat(MESSAGES) == original.encode_chat(MESSAGES)
    assert (rebuilt.vocab_size, rebuilt.bos_token_id) == (original.vocab_size, original.bos_token_id)
    # Also the end of text, at which generation is of no more use.
    assert rebuilt.eos_token_ids == (2, 0)


@pytest.mark.parametrize("pre", COMPARABLE)
def test_text_is_cut_as_transformers_cuts_it(pre: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = save_reference_gguf(folder, tmp_path / "model.gguf", pre_tokenizer=pre)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    tokenizer = open_checkpoint(str(path)).tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False), text


def test_smollm_cuts_digits_before_words(folder: Path, tmp_path: Path) -> None:
    path = save_reference_gguf(folder, tmp_path / "model.gguf", pre_tokenizer="smollm")
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.encode("a  2") == [*tokenizer.encode("a  "), *tokenizer.encode("2")]


def test_llama_bpe_starts_texts_with_bos_unless_told_not_to(folder: Path, tmp_path: Path) -> None:
    metadata = read_header(save_reference_gguf(folder, tmp_path / "model.gguf", pre_tokenizer="llama-bpe")).metadata
    assert build_tokenizer(metadata).encode("a", add_special_tokens=True)[0] == 1
    told = build_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False})
    assert told.encode("a", add_special_tokens=True) == told.encode("a")


def test_sentencepiece_merges_by_score_with_byte_fallback() -> None:
    tokenizer = build_tokenizer(tiny_metadata())
    space, a, b, space_a, ab = range(259, 264)
    assert tokenizer.encode("a ab") == [space_a, space_a, b]
    assert tokenizer.encode("bab") == [space, b, ab]
    assert tokenizer.encode("é") == [space, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("a", add_special_tokens=True) == [1, space_a]
    assert tokenizer.decode([1, space_a, b, space_a, 3 + 0xC3, 3 + 0xA9]) == "ab aé"
    assert a not in tokenizer.encode("a")


def test_sentencepiece_token_types_decide_what_is_special() -> None:
    tokenizer = build_tokenizer(tiny_metadata())
    assert tokenizer.encode("<s><t>") == [1, 264]
    assert tokenizer.decode([1, 264, 2]) == "<t>"
    assert not {1, 264} & set(tokenizer.encode("<s><t>", parse_special=False))


def test_sentencepiece_streams_like_it_decodes() -> None:
    tokenizer = build_tokenizer(tiny_metadata())
    ids = tokenizer.encode("ab é a")
    stream = tokenizer.decode_stream(skip_special_tokens=True)
    assert "".join(stream.step(token_id) or "" for token_id in ids) == "ab é a"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": []}, "only gpt2 and llama"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new-one", "tokenizer.ggml.merges": []}, "new-one"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q q"]}, "damaged"),
        ({"tokenizer.ggml.scores": []}, "damaged"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        build_tokenizer(tiny_metadata(**changes))


def test_embedded_model_equals_transformers(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    reference = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    encoded = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert tokenizer.encode_chat(MESSAGES) == list(encoded["input_ids"])
    assert tokenizer.eos_token_ids == (2, 0)


def test_reference_tokenizer_is_not_trivial(tmp_path: Path) -> None:
    save_reference_tokenizer(tmp_path)
    assert len(read_tokenizer(tmp_path).encode("The invoice of March")) < 12
