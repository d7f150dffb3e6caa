"""Finished layers of a run that may be interrupted, in `OUT/.partial`."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mmserve.errors import RequestError
from mmserve.quantizer.states import HiddenStates, save_tensors

FOLDER_NAME = ".partial"
_IDENTITY_NAME = "run.json"
# All that a run has in its folder beside that.
_OWN_FILES = ("lock", "unfinished", "*.bin", "*.json", "layer-*.safetensors")


def require_new(out: Path) -> None:
    """Raises `RequestError` for a file, or a folder with something in it that is no unfinished run."""
    if out.exists() and not out.is_dir():
        raise RequestError("invalid_request", f"{out} is not a folder", param="output")
    _clear_remains(out / FOLDER_NAME)
    if not (out / FOLDER_NAME / _IDENTITY_NAME).is_file() and out.exists() and any(out.iterdir()):
        raise RequestError("invalid_request", f"{out} is not empty: give a new folder", param="output")


def _clear_remains(folder: Path) -> None:
    """Of a run that was ended before it had begun, or when it was done and cleaning up."""
    if folder.is_dir() and not (folder / _IDENTITY_NAME).is_file():
        for pattern in _OWN_FILES:
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


class PartialRun:
    """Layers are kept under their numbers, and beside them the hidden states that the next one starts from."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """Raises `RequestError` where `out` holds something else than a run of this `identity`."""
        self._folder = out / FOLDER_NAME
        self._identity_file = self._folder / _IDENTITY_NAME
        if self._identity_file.is_file():
            if json.loads(self._identity_file.read_text()) != dict(identity):
                raise RequestError(
                    "invalid_request",
                    f"{self._folder} holds an unfinished run of another model, other texts or other settings: "
                    "remove it, or give another folder",
                    param="output",
                )
        else:
            require_new(out)
            self._folder.mkdir(parents=True)
            self._write(self._identity_file, dict(identity))

    @contextmanager
    def held(self) -> Iterator[None]:
        """For whoever goes on with it. Raises `RequestError` while another process does."""
        message = f"another `mmserve quantize` is writing to {self._folder.parent}: wait, or give another folder"
        busy = RequestError("invalid_request", message, param="output")
        try:
            lock = (self._folder / "lock").open("w")
        except FileNotFoundError:
            raise busy from None
        with lock:
            # The kernel drops the lock if this process dies.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            # The other may have finished meanwhile.
            if not self._identity_file.is_file():
                raise busy
            yield

    @property
    def num_layers_done(self) -> int:
        count = 0
        while self._layer_file(count).is_file():
            count += 1
        return count

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        return load_file(self._layer_file(index))

    def keep_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call it when the states after the layer are there: from then on the layer counts as done."""
        unfinished = self._folder / "unfinished"
        save_tensors({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, unfinished)
        unfinished.replace(self._layer_file(index))

    def remembered(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, as JSON has it, once: a run that goes on finds what it had."""
        file = self._folder / f"{name}.json"
        if not file.is_file():
            self._write(file, make())
        return json.loads(file.read_text())

    def states(self, kind: str, index: int, shape: tuple[int, int, int]) -> HiddenStates:
        """Those that layer `index` starts from; `kind` is whose."""
        return HiddenStates(self._folder / f"{kind}-{index}.bin", shape)

    def states_between(self, kind: str, shape: tuple[int, int, int]) -> HiddenStates:
        """Room for what is needed inside any one layer."""
        return HiddenStates(self._folder / f"{kind}-between.bin", shape)

    def require_states(self, kind: str, index: int, shape: tuple[int, int, int]) -> None:
        """Raises `RequestError` where those that an interrupted run had got to are not there as a whole."""
        file = self._folder / f"{kind}-{index}.bin"
        if not file.is_file() or file.stat().st_size != prod(shape) * torch.float32.itemsize:
            message = f"{file} is missing or damaged, so the run cannot go on: remove {self._folder}"
            raise RequestError("invalid_request", message, param="output")

    def remove(self) -> None:
        # First what says that the rest is a run, which could go on.
        self._identity_file.unlink()
        shutil.rmtree(self._folder)

    def _write(self, file: Path, content: Any) -> None:
        """As JSON, all of it or nothing."""
        unfinished = self._folder / "unfinished"
        unfinished.write_text(json.dumps(content))
        unfinished.replace(file)

    def _layer_file(self, index: int) -> Path:
        return self._folder / f"layer-{index}.safetensors"
