"""Pictures through the offline facade: wherever they are cut and however they come, the answer is the same."""

import io
import threading
import time
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
from mmserve.errors import EngineError, RequestError, SetupError
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


@pytest.mark.parametrize("image", ["page.png", b"GIF89a", None, [[[0, 0, 0]]]])
def test_what_is_no_picture_is_refused(llm: LLM, image: object) -> None:
    with pytest.raises(RequestError, match="picture of Pillow"):
        answer(llm, image)


@pytest.mark.parametrize("part", [{"type": "image"}, {"text": "no type"}, "text", None])
def test_a_part_that_is_none_is_refused(llm: LLM, part: object) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": [part]}], greedy(1))
    assert caught.value.code == "invalid_request"


def test_closing_does_not_take_pictures_from_under_the_engine(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = replace(engine_config(model, max_num_seqs=1), vision=VisionConfig(pixels_on="device"))
    llm = LLM(config=config)
    close_prompts = llm._prompts.close
    errors: list[str] = []

    def close_and_linger() -> None:
        close_prompts()
        time.sleep(0.5)

    def ask() -> None:
        image = Image.open(io.BytesIO(picture_bytes(1, 640, 480)))
        conversations = [
            [{"role": "user", "content": [{"type": "image", "image": image.rotate(angle)}]}] for angle in range(8)
        ]
        try:
            llm.chat(conversations, greedy(40))
        except EngineError as error:
            errors.append(error.code)

    llm._prompts.close = close_and_linger  # type: ignore[method-assign]
    thread = threading.Thread(target=ask)
    thread.start()
    while len(llm._client._mailboxes) < 8:
        time.sleep(0.0005)
    llm.close()
    thread.join(10)
    assert errors == ["shutting_down"]
    assert "the engine died" not in caplog.text


def test_an_attention_that_is_not_there_ends_the_start(model: Path) -> None:
    config = replace(engine_config(model), vision=VisionConfig(attention="triton"))
    with pytest.raises(SetupError, match="needs a GPU"):
        LLM(config=replace(config, device="cpu"))


def test_a_gpu_cuts_pictures_itself() -> None:
    assert [device_type(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda"]
    assert pixels_on(EngineConfig(device="cuda:0")) == "device"
    assert pixels_on(EngineConfig(device="cpu")) == "worker"
    assert pixels_on(EngineConfig(device="cuda", vision=VisionConfig(pixels_on="worker"))) == "worker"
