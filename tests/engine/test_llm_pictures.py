"""Pictures through the offline facade: wherever they are cut and however they come, the answer is the same."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_driver import engine_config, greedy
from PIL import Image
from vision_checkpoint import picture_bytes, save_vision_model

from mmserve.config import EngineConfig, VisionConfig
from mmserve.engine.prompt_factory import device_type, pixels_on
from mmserve.errors import RequestError, SetupError
from mmserve.llm import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module", params=["worker", "device"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    config = replace(engine_config(model, prefix_caching=False), vision=VisionConfig(pixels_on=request.param))
    with LLM(config=config) as llm:
        yield llm


def answer(llm: LLM, *images: object) -> tuple[int, ...]:
    pictures = [{"type": "image", "image": image} for image in images]
    ((completion,),) = llm.chat([{"role": "user", "content": [*pictures, {"type": "text", "text": "Who?"}]}], greedy(8))
    return completion.token_ids


def test_pictures_of_pillow_and_arrays(llm: LLM, model: Path) -> None:
    images = [Image.open(io.BytesIO(picture_bytes(seed))) for seed in (1, 2)]
    first, second, both = answer(llm, images[0]), answer(llm, images[1]), answer(llm, *images)
    assert len({first, second, both}) == 3
    assert answer(llm, np.array(images[0].convert("RGB"))) == first
    assert first == expected(model, images[0])


_expected: dict[str, tuple[int, ...]] = {}


def expected(model: Path, image: Image.Image) -> tuple[int, ...]:
    """By an engine whose workers cut."""
    if "first" not in _expected:
        with LLM(config=replace(engine_config(model), vision=VisionConfig(pixels_on="worker"))) as llm:
            _expected["first"] = answer(llm, image)
    return _expected["first"]


def test_a_bad_array_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="height, width, 3"):
        answer(llm, np.zeros((4, 4)))


def test_an_attention_that_is_not_there_ends_the_start(model: Path) -> None:
    config = replace(engine_config(model), vision=VisionConfig(attention="triton"))
    with pytest.raises(SetupError, match="needs a GPU"):
        LLM(config=replace(config, device="cpu"))


def test_a_gpu_cuts_pictures_itself() -> None:
    assert [device_type(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda"]
    assert pixels_on(EngineConfig(device="cuda:0")) == "device"
    assert pixels_on(EngineConfig(device="cpu")) == "worker"
    assert pixels_on(EngineConfig(device="cuda", vision=VisionConfig(pixels_on="worker"))) == "worker"
