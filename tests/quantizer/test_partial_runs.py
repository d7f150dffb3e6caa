"""Runs that were interrupted, or given what they cannot do: nothing wrong is made of them, and nothing blocks."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from quantized_models import calibration_ids, quantizer
from reference_models import save_reference_model
from safetensors.torch import load_file, save_file

from mmserve.errors import RequestError, SetupError
from mmserve.quantizer.partial import require_new
from mmserve.quantizer.states import HiddenStates, save_tensors


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def interrupted(folder: Path, out: Path, scheme: str = "gptq") -> Path:
    def stop(done: int, _all: int) -> None:
        if done == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        quantizer(folder, out, scheme, samples=calibration_ids()).run(stop)
    return out / ".partial"


def changed(folder: Path, to: Path, factor: float, name: str) -> Path:
    """A copy of the model, one of its matrices multiplied."""
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("kind", ["states", "wanted"])
def test_states_that_are_missing_end_the_run(llama: Path, tmp_path: Path, kind: str) -> None:
    partial = interrupted(llama, tmp_path)
    (partial / f"{kind}-2.bin").unlink()
    with pytest.raises(RequestError, match=f"{kind}-2.bin is missing or damaged"):
        quantizer(llama, tmp_path, "gptq", samples=calibration_ids()).run()
    assert not (tmp_path / "config.json").exists()


def test_another_model_of_the_same_shape_does_not_go_on(llama: Path, tmp_path: Path) -> None:
    other = changed(llama, tmp_path / "other", 1.7, "model.layers.1.self_attn.v_proj.weight")
    interrupted(llama, tmp_path / "out")
    with pytest.raises(RequestError, match="another model, other texts or other settings"):
        quantizer(other, tmp_path / "out", "gptq", samples=calibration_ids())


def test_what_a_run_left_that_was_done_is_removed(llama: Path, tmp_path: Path) -> None:
    quantizer(llama, tmp_path, "rtn").run()
    partial = tmp_path / ".partial"
    partial.mkdir()
    for name in ("lock", "states-1.bin", "kept.json", "layer-0.safetensors"):
        (partial / name).touch()
    with pytest.raises(RequestError, match="is not empty"):
        require_new(tmp_path)
    assert not partial.exists()


def test_what_a_run_left_that_had_not_begun_is_no_obstacle(llama: Path, tmp_path: Path) -> None:
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "unfinished").touch()
    assert quantizer(llama, tmp_path, "rtn").run().num_layers == 3


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / ".partial" / "notes.txt"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(RequestError, match="is not empty"):
        require_new(tmp_path)
    assert other.exists()


@pytest.mark.parametrize("scheme", ["gptq", "awq", "fp8", "rtn"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_end_the_run(llama: Path, tmp_path: Path, scheme: str, number: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = changed(llama, tmp_path / "damaged", number, name)
    samples = None if scheme == "rtn" else calibration_ids()
    with pytest.raises(SetupError, match=f"{name} has numbers that are not finite"):
        quantizer(damaged, tmp_path / "out", scheme, samples=samples).run()


@pytest.mark.parametrize("scheme", ["gptq", "fp8"])
def test_weights_that_are_too_large_end_the_run(llama: Path, tmp_path: Path, scheme: str) -> None:
    huge = changed(llama, tmp_path / "huge", 1e30, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(SetupError, match="is not finite"):
        quantizer(huge, tmp_path / "out", scheme, samples=calibration_ids()).run()


def test_a_disk_without_room_is_said_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(_file: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*states-0.bin'"):
        HiddenStates(tmp_path / "states-0.bin", (2, 3, 4))
    with pytest.raises(OSError, match="missing"):
        save_tensors({"a": torch.ones(2)}, tmp_path / "missing" / "a.safetensors")


def test_what_a_run_is_is_written_at_once(llama: Path, tmp_path: Path) -> None:
    partial = interrupted(llama, tmp_path)
    assert json.loads((partial / "run.json").read_text())["scheme"] == "gptq"
    assert not (partial / "unfinished").exists()
