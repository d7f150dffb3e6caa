"""Quantized vision-language models: what sees is as it was, and pictures are ranked as in full precision."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_ranking import FAMILIES, MIN_FALL, MIN_FALL_QUANTIZED, NUM_PICTURES, SeenPictures, save_seeing_model
from reference_gguf import save_reference_gguf
from reference_models import save_reference_model
from stored_models import FORMS, is_of_encoder, stored
from vision_driver import relative_error

from mmserve.engine.engine import Engine
from mmserve.errors import SetupError
from mmserve.vision import feed_forward
from mmserve.weights.checkpoint import open_checkpoint

# Precision, and whether a CPU has the matrices in bfloat16, too.
WAYS = [("float32", "keep"), ("float16", "keep"), ("bfloat16", "keep"), ("bfloat16", "never")]
ON_LOAD = "fp8 on load"
# Of its output, where activations are rounded, too: to 8 bits, or to FP8's 4.
ENCODER_ERRORS = {"int8 w8a8": 2.5e-2, "fp8 w8a8": 8e-2, "fp8": 8e-2, "fp8 static": 8e-2}


class Seeing:
    """A checkpoint in full precision, and what it sees in each precision of computation."""

    def __init__(self, family: str, folder: Path) -> None:
        self.reference = save_seeing_model(family, folder)
        self.folder = folder
        self.full = cache(self._full)

    def _full(self, dtype: str) -> SeenPictures:
        return self.see(self.folder, dtype=dtype)

    def see(self, folder: Path, **fields: Any) -> SeenPictures:
        return SeenPictures(folder, self.reference, **fields)


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp(request.param))


def check_ranking(small: SeenPictures, full: SeenPictures) -> None:
    """The order of the pictures is far from chance in full precision, and is the same after quantization."""
    assert full.smallest_fall > MIN_FALL
    assert float((small.similarities - full.similarities).abs().max()) < 0.75 * full.smallest_fall
    assert small.smallest_fall > MIN_FALL_QUANTIZED
    in_order = list(range(NUM_PICTURES))
    for seen in (small, full):
        assert seen.similarities[[0, -1]].argsort(dim=1, descending=True).tolist() == [in_order, in_order[::-1]]
    across = torch.nn.functional.cosine_similarity(small.hidden[:, None], full.hidden[None], dim=-1)
    assert across.argmax(dim=1).tolist() == in_order


@pytest.mark.parametrize("form", [*FORMS, ON_LOAD])
def test_pictures_are_ranked_as_in_full_precision(form: str, seeing: Seeing, tmp_path: Path) -> None:
    folder = seeing.folder if form == ON_LOAD else stored(seeing.folder, tmp_path / "small", form)
    asked = {"quantization": "fp8"} if form == ON_LOAD else {}
    for dtype, dense_copy in WAYS:
        small, full = seeing.see(folder, dtype=dtype, dense_copy=dense_copy, **asked), seeing.full(dtype)
        assert all(map(torch.equal, small.encoded, full.encoded))
        assert 1e-2 < relative_error(small.hidden, full.hidden) < 0.3
        check_ranking(small, full)


def _blank(engine: Engine) -> None:
    model: Any = engine._runner._model
    encode = model.encode_images
    model.encode_images = lambda patches: [torch.zeros_like(tokens) for tokens in encode(patches)]


def _all_the_same(engine: Engine) -> None:
    model: Any = engine._runner._model
    encode = model.encode_images
    first: list[torch.Tensor] = []

    def encode_first(patches: Any) -> list[torch.Tensor]:
        first.extend(encode(patches)[: 1 - len(first)])
        return first * len(patches)

    model.encode_images = encode_first


def _dropped(engine: Engine) -> None:
    encoder: Any = engine._runner.encoder
    encoder.place = lambda embedded, rows: (embedded, [])


@pytest.mark.parametrize("spoil", [_blank, _all_the_same, _dropped])
@pytest.mark.parametrize("form", ["awq", "int8 w8a8", "fp8"])
def test_one_answer_for_all_pictures_is_noticed(
    spoil: Callable[[Engine], None], form: str, seeing: Seeing, tmp_path: Path
) -> None:
    folder = stored(seeing.folder, tmp_path / "small", form)
    full = seeing.full("float32")
    check_ranking(seeing.see(folder), full)
    spoiled = seeing.see(folder, spoil=spoil)
    assert abs(spoiled.smallest_fall) < 1e-4
    with pytest.raises(AssertionError):
        check_ranking(spoiled, full)


def test_pictures_in_another_order_are_noticed(seeing: Seeing) -> None:
    full, turned = seeing.full("float32"), seeing.see(seeing.folder)
    turned.hidden = turned.hidden[[0, 2, 1, 3, 4]]
    assert turned.smallest_fall < 0
    with pytest.raises(AssertionError):
        check_ranking(turned, full)


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_that_is_quantized(form: str, seeing: Seeing, tmp_path: Path) -> None:
    """Published checkpoints leave it as it is. Where one does not, its output is that of the stored numbers."""
    folder = stored(seeing.folder, tmp_path / "small", form, is_of_encoder)
    unpacked = stored(seeing.folder, tmp_path / "unpacked", form, is_of_encoder, unpacked=True)
    for dtype, dense_copy in WAYS:
        small, same = (
            torch.cat(seeing.see(each, dtype=dtype, dense_copy=dense_copy).encoded).float()
            for each in (folder, unpacked)
        )
        assert relative_error(small, same) < ENCODER_ERRORS.get(form, 2e-2)
        if form.startswith(("w8a16", "int8")):
            assert relative_error(small, torch.cat(seeing.full(dtype).encoded).float()) < 3e-2


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_layers_that_would_be_padded_are_not_where_they_are_quantized(
    form: str, seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the towers' feed-forward layers are as wide as its products like it: in full precision."""
    folders = (seeing.folder, stored(seeing.folder, tmp_path / "small", form, is_of_encoder))
    before = [torch.cat(seeing.see(folder).encoded) for folder in folders]
    monkeypatch.setattr(feed_forward, "padded_width", lambda inner, device: inner + 32)
    for folder, expected in zip(folders, before, strict=True):
        torch.testing.assert_close(torch.cat(seeing.see(folder).encoded), expected, rtol=1e-4, atol=1e-4)


def test_a_gguf_file_of_a_vision_language_model_is_refused(tmp_path: Path) -> None:
    """Its encoder is in another file, and its pictures would be left out of every answer."""
    folder = save_reference_model("qwen2", tmp_path / "qwen2", num_hidden_layers=1)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"model_type": "qwen2"', '"model_type": "qwen2vl"'))
    file = save_reference_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(SetupError, match="'qwen2vl' is not supported") as caught:
        open_checkpoint(str(file))
    assert caught.value.code == "model_unavailable"
