import io
import json
from pathlib import Path

import pytest
import sentencepiece
from gguf.constants import TokenType

from mmserve.errors import SetupError
from mmserve.weights.gguf_tokenizer import build_tokenizer
from mmserve.weights.model_files import read_tokenizer

SENTENCES = [
    "The invoice of 12 March is due within 30 days; the total is 1,284.50 EUR including tax.",
    "Page after page the report says that sales rose, that costs fell, and that nobody knows why.",
    "Dear Sir or Madam, thank you for the letter. Please find the table of the results attached.",
]
TEXTS = ["Hello world", "invoice of 12 March 東京 é 👩", "a\n\nb", "The report says that sales rose", ""]


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=model,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | special))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_a_folder_with_sentencepiece_only_is_converted(text: str, sentencepiece_folder: Path) -> None:
    tokenizer = read_tokenizer(sentencepiece_folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == [1, *reference.encode(text)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize("text", [*TEXTS, "  two  spaces ", "<unk>"])
def test_the_same_vocabulary_in_gguf_gives_sentencepiece_s_ids(text: str, sentencepiece_folder: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    ids = range(reference.get_piece_size())
    kinds = [(reference.is_control, TokenType.CONTROL), (reference.is_byte, TokenType.BYTE)]
    types = [next((kind for test, kind in kinds if test(i)), TokenType.NORMAL) for i in ids]
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [reference.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": [TokenType.UNKNOWN, *types[1:]],
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    assert tokenizer.encode(text, parse_special=False) == reference.encode(text)


def test_without_sentencepiece_it_says_what_to_install(
    sentencepiece_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.weights.model_files.find_spec", lambda _: None)
    with pytest.raises(SetupError, match="pip install sentencepiece") as caught:
        read_tokenizer(sentencepiece_folder)
    assert caught.value.code == "missing_dependency"
