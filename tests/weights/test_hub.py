import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from mmserve.errors import SetupError
from mmserve.weights import hub

REPOSITORY = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "modeling_custom.py",
    "README.md",
]


def test_local_folder_and_file_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.resolve("model.gguf") == Path("model.gguf")


def test_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert hub.resolve(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(SetupError, match=r"several models \(a\.gguf, b\.gguf\)"):
        hub.resolve(str(tmp_path))


def test_what_is_no_model_says_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(SetupError, match=r"neither config\.json nor"):
        hub.resolve(str(tmp_path))
    with pytest.raises(SetupError, match=r"is not a \.gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))
    with pytest.raises(SetupError, match=r"no model 'gpt-7'.*smollm2-135m.*hub id"):
        hub.resolve("gpt-7")


@pytest.mark.parametrize("with_weights", [True, False])
def test_hub_is_asked_for_safetensors_and_text_only(
    with_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(filter_repo_objects(REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("org/name", with_weights=with_weights) == tmp_path
    weights = {"model-00001-of-00002.safetensors"} if with_weights else set()
    assert set(asked) == {*REPOSITORY[:8], "model.safetensors.index.json", *weights}


def test_failure_halfway_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SetupError, match="cannot fetch org/name: ConnectionResetError: peer went away"):
        hub.pull("org/name")


def run_offline(home: Path) -> str:
    code = "from mmserve.weights import hub\ntry: print(hub.resolve('org/name'))\nexcept Exception as e: print(repr(e))"
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_offline_uses_the_hub_s_cache_or_says_what_to_do(tmp_path: Path) -> None:
    assert "SetupError('model_unavailable'" in run_offline(tmp_path)
    assert "HF_HUB_OFFLINE" in run_offline(tmp_path)
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    assert run_offline(tmp_path) == str(snapshot)


def test_starting_from_gguf_imports_neither_transformers_nor_the_hub(smollm2_path: Path) -> None:
    code = (
        "import sys\nfrom mmserve.weights.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(smollm2_path)!r}).tokenizer().encode_chat([])\n"
        "print([name for name in ('transformers', 'huggingface_hub', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
