"""Builds a tokenizer from GGUF metadata: byte-level BPE (`gpt2`) or sentencepiece BPE with byte fallback (`llama`)."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mmserve.errors import SetupError
from mmserve.weights.gguf_config import end_token_ids
from mmserve.weights.special_tokens import set_sequence_ends
from mmserve.weights.tokenizer import Tokenizer

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> how the text is cut before merging.
_GPT2_NAMES = frozenset({"", "default", "gpt-2", "gpt2", "olmo", "phi-2", "mpt"})
_DIGIT_NAMES = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_SPLIT),
    "tekken": _TEKKEN_SPLIT,
}
# These look a whole piece up before they merge, and start a text with the bos token unless told not to.
_WHOLE_PIECES_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
_METASPACE = "\u2581"


class TokenType(IntEnum):
    """The GGUF specification's kinds of vocabulary entries."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer with its chat template. `SetupError` names a kind that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders or not metadata.get("tokenizer.ggml.tokens"):
        raise SetupError(
            "model_unavailable", f"the GGUF file's tokenizer is {kind!r}, only gpt2 and llama are supported"
        )
    try:
        backend = builders[kind](metadata)
    except SetupError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for merges that do not fit the vocabulary
        raise SetupError("model_unavailable", f"the GGUF file's tokenizer is damaged ({error})") from None
    special_tokens = _special_tokens(metadata)
    _add_tokens(backend, metadata)
    _add_sequence_ends(backend, metadata)
    return Tokenizer(
        backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens,
        extra_eos_token_ids=end_token_ids(metadata),
    )


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _types(metadata: Mapping[str, Any]) -> Sequence[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "")
    merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=name in _WHOLE_PIECES_FIRST))
    backend.pre_tokenizer = _pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    if _SPLITS.get(name) == _QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    return backend


def _split_merge(merge: str) -> tuple[str, str]:
    # The first character may itself be a space.
    middle = merge.index(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_NAMES:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name not in _SPLITS:
        raise SetupError("model_unavailable", f"the GGUF file's pre-tokenizer {name!r} is not supported")
    split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocabulary = _vocabulary(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_of_pieces(metadata)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _METASPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), replace]) if adds_space else replace
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_pieces(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sentencepiece joins the pair whose joint piece scores best; as merges, that is every split, best score first."""
    types, scores = _types(metadata), metadata["tokenizer.ggml.scores"]
    pieces = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if types[i] == TokenType.NORMAL}
    splits = [(scores[i], *split) for piece, i in pieces.items() for split in _splits(piece, pieces)]
    splits.sort(key=lambda split: (-split[0], pieces[split[1]], pieces[split[2]]))
    return [(left, right) for _, left, right in splits]


def _splits(piece: str, pieces: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for middle in range(1, len(piece)):
        if piece[:middle] in pieces and piece[middle:] in pieces:
            yield piece[:middle], piece[middle:]


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens as special ones; user-defined ones as plain added tokens, which are matched whole as well."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_sequence_ends(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    starts = metadata.get("tokenizer.ggml.model") == "llama"
    starts = starts or metadata.get("tokenizer.ggml.pre") in _WHOLE_PIECES_FIRST
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", starts),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    special_tokens = _special_tokens(metadata)
    set_sequence_ends(
        backend, **{name: special_tokens.get(f"{name}_token") if on else None for name, on in wanted.items()}
    )


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
