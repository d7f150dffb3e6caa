"""A vision-language model whose decoder is quantized: the tower is not, and pictures keep what tells them apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy
from reference_qwen_vl import IMAGE_TOKEN, Reference, save_qwen_vl
from safetensors.torch import load_file, save_file
from stored_matrices import compressed_words
from vision_driver import build_prompt, patch_store, random_picture, random_text, relative_error, run_with_images

from mmserve.engine.engine import Engine

GROUP = 32
PICTURES = [(1, 161, 184), (2, 161, 184), (3, 120, 200), (4, 200, 120), (5, 300, 100)]


def as_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def as_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def as_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    grouped = weight.view(weight.shape[0], -1, GROUP)
    scales = grouped.abs().amax(dim=2) / 7.5
    numbers = (grouped / scales[:, :, None]).round().clamp(-8, 7).view(weight.shape) + 8
    return {"weight_packed": compressed_words(numbers, 4), "weight_scale": scales}


def group_of(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["re:.*visual.*"]}


FORMS = {
    "fp8": (as_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "int8": (as_int8, group_of({"num_bits": 8, "type": "int", "strategy": "channel"})),
    "int4": (as_int4, group_of({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP})),
}


def quantized(folder: Path, out: Path, form: str) -> Path:
    """The checkpoint in `folder` with its decoder's matrices in `form`."""
    quantize, stored = FORMS[form]
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    file = out / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        if "visual" not in name and name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + part: x.contiguous() for part, x in quantize(weight).items()}
        else:
            tensors[name] = weight
    assert any("_scale" in name for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return out


class Pictures:
    """One engine, and what its model makes of each of `PICTURES`."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        model: Any
        engine = Engine(engine_config(folder))
        model = engine._runner._model
        pictures = [reference.picture(random_picture(*each)) for each in PICTURES]
        with torch.inference_mode():
            self.encoded = model.encode_images([item.patches for picture in pictures for item in picture.items])
        seen: list[torch.Tensor] = []
        logits: Callable[[torch.Tensor], torch.Tensor] = model.logits

        def logits_seen(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return logits(hidden)

        model.logits = logits_seen
        with patch_store() as store:
            for picture in pictures:
                prompt = build_prompt([picture, random_text(0, 8, range(3, 400))], IMAGE_TOKEN, store)
                run_with_images(engine, [prompt], greedy(1))
        self.hidden = torch.stack([hidden[-1] for hidden in seen]).float()

    def similarities(self, others: torch.Tensor) -> torch.Tensor:
        """Of each picture's last hidden state to each of others."""
        return torch.nn.functional.cosine_similarity(self.hidden[:, None], others[None], dim=-1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference("qwen2_5_vl", save_qwen_vl("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def full(reference: Reference) -> Pictures:
    return Pictures(reference.folder, reference)


@pytest.mark.parametrize("form", FORMS)
def test_pictures_are_told_apart(form: str, reference: Reference, full: Pictures, tmp_path: Path) -> None:
    small = Pictures(quantized(reference.folder, tmp_path / form, form), reference)
    for expected, out in zip(full.encoded, small.encoded, strict=True):
        assert torch.equal(out, expected)
    assert relative_error(small.hidden, full.hidden) > 1e-4
    # Each picture is nearest to itself: the answers are not one for all.
    assert small.similarities(full.hidden).argmax(dim=1).tolist() == list(range(len(PICTURES)))
    if form == "int8":
        # What four bits cost a random model of this size is more than what its pictures differ by.
        rankings = [each.similarities(each.hidden).argsort(dim=1).tolist() for each in (small, full)]
        assert rankings[0] == rankings[1]
