"""The JSON files of a Hugging Face model folder, and the tokenizer that they describe."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from mmserve.errors import SetupError
from mmserve.weights.special_tokens import set_sequence_ends
from mmserve.weights.tokenizer import Tokenizer

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
_PAIR_FILES = ("vocab.json", "merges.txt")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`; `SetupError` if there is none. Keys that name Python files (`auto_map`) are dropped unread."""
    if not (folder / "config.json").is_file():
        raise SetupError("model_unavailable", f"{folder} has no config.json: give the folder of a Hugging Face model")
    config = read_json(folder / "config.json")
    config.pop("auto_map", None)
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """`generation_config.json`, or nothing."""
    return read_json(folder / "generation_config.json")


def read_processor_config(folder: Path) -> dict[str, Any]:
    """Settings of the image processor: part of `processor_config.json` since transformers 5, or their own file."""
    nested = read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else read_json(folder / "preprocessor_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer in any form that `read_tokenizer` takes."""
    single = any((folder / name).is_file() for name in ("tokenizer.json", *_SENTENCEPIECE_FILES))
    return single or all((folder / name).is_file() for name in _PAIR_FILES)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer with its chat template. `SetupError` if there is none, or it is damaged."""
    if not has_tokenizer(folder):
        raise SetupError(
            "model_unavailable", f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): fetch the model again"
        )
    settings = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **settings})
    backend = _read_backend(folder)
    if "add_bos_token" in settings or "add_eos_token" in settings:
        set_sequence_ends(
            backend,
            bos=special_tokens.get("bos_token") if settings.get("add_bos_token") else None,
            eos=special_tokens.get("eos_token") if settings.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else _convert_with_transformers(folder)
    except SetupError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise SetupError("model_unavailable", f"the tokenizer in {folder} cannot be read: {error}") from None


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    if any((folder / name).is_file() for name in _SENTENCEPIECE_FILES) and find_spec("sentencepiece") is None:
        raise SetupError(
            "missing_dependency",
            f"{folder} has no tokenizer.json but a sentencepiece model, and reading that needs another package: "
            "run `pip install sentencepiece`",
        )
    # Takes seconds to import, and only folders without tokenizer.json need it.
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise SetupError(
            "model_unavailable", f"the tokenizer in {folder} has no fast form: convert it to a tokenizer.json"
        )
    return backend


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError("model_unavailable", f"{path} is not valid JSON ({error}): fetch the model again") from None
    return content if isinstance(content, dict) else {}
