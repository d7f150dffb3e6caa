"""Greedy tokens of the Qwen-VL models equal transformers', however images are batched, cut, preempted or cached."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy
from reference_models import save_reference_model
from reference_qwen_vl import FAMILIES, IMAGE_TOKEN, Reference, save_qwen_vl
from vision_driver import run_with_images
from vision_equality import (
    NUM_TOKENS,
    Case,
    Pieces,
    VisionEquality,
    all_pieces,
    check_folders,
    open_case,
    pictures,
    shards,
    text,
    with_weights,
)
from vision_reference import prompt_ids

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.engine.scheduler import ScheduledBatch
from mmserve.request import ImageSpan

# Room for any image of the prompts, but not for two.
FEW_ENCODER_TOKENS = 55


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case[Reference]]:
    family = request.param
    reference = Reference(family, save_qwen_vl(family, tmp_path_factory.mktemp(family)))
    with open_case(reference, IMAGE_TOKEN, all_pieces(pictures(reference))) as case:
        yield case


class TestQwenVL(VisionEquality):
    spare_blocks = (6, 14, 20, 36)

    def few_encoder_tokens(self, case: Case[Any]) -> int:
        return FEW_ENCODER_TOKENS


def test_checkpoint_can_show_a_fault(case: Case[Reference]) -> None:
    """A swapped or lost image, and positions along one axis, change the tokens of the reference itself."""
    for index in (1, 2, 3):
        pieces, answer = case.pieces[index], case.answers[index]
        vision = case.reference.vision_arguments(pieces)
        assert len(set(answer)) >= 8
        one_axis = torch.arange(len(prompt_ids(pieces))).expand(3, 1, -1)
        assert case.answer(pieces, position_ids=one_axis) != answer
        pixels = vision["pixel_values"].clone()
        pixels[: int(vision["image_grid_thw"][0].prod())] = 0.0
        assert case.answer(pieces, pixel_values=pixels) != answer
    before, first, second, *after = case.pieces[2]
    assert case.answer([before, second, first, *after]) != case.answers[2]


def test_checkpoint_shows_lost_windows_or_features(case: Case[Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    visual = case.reference.model.model.visual
    if case.reference.family == "qwen2_5_vl":
        monkeypatch.setattr(visual, "fullatt_block_indexes", [0, 1, 2])
    elif case.reference.family == "qwen3_vl":
        monkeypatch.setattr(visual, "deepstack_visual_indexes", [])
    else:
        monkeypatch.setattr(visual.blocks[1].attn, "forward", lambda x, **_: x)
    assert case.answer(case.pieces[2]) != case.answers[2]


def test_an_image_that_returns_does_not_bar_the_way(case: Case[Reference]) -> None:
    screen, page = case.pieces[1][1], case.pieces[2][4]
    pieces: Pieces = [text(30, 4), screen, text(31, 2), page, text(32, 2), screen, text(33, 3)]
    engine = case.engine(encoder_cache_tokens=FEW_ENCODER_TOKENS)
    assert run_with_images(engine, [case.prompt(pieces)], greedy(NUM_TOKENS)) == [case.answer(pieces)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("vision", "text_model"), [("visual.", "model."), ("model.visual.", "model.language_model.")])
def test_names_of_every_generation_of_checkpoints(tmp_path: Path, family: str, vision: str, text_model: str) -> None:
    """As published with Qwen2-VL, and as published with Qwen3-VL; tied, in shards, the tied head stored as well."""
    reference = Reference(family, save_qwen_vl(family, tmp_path / "saved", tied=True, max_shard_size="60KB"))
    renamed = {_named(name, vision, text_model): tensor for name, tensor in shards(reference.folder).items()}
    renamed["lm_head.weight"] = renamed[f"{text_model}embed_tokens.weight"].clone()
    check_folders(reference, IMAGE_TOKEN, with_weights(reference.folder, tmp_path / "renamed", renamed))


def _named(name: str, vision: str, text_model: str) -> str:
    bare = name.removeprefix("model.").removeprefix("language_model.")
    if bare.startswith("visual."):
        return vision + bare.removeprefix("visual.")
    return bare if bare.startswith("lm_head.") else text_model + bare


def test_a_step_without_tokens_is_harmless(case: Case[Reference]) -> None:
    """When the newest sequence was the only one that could run, and had to give its blocks back."""
    assert case.engine()._runner.run(ScheduledBatch()).take() == {}


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    engine = Engine(engine_config(save_reference_model("qwen2", tmp_path)))
    span = ImageSpan(0, 1, b"image", (1, 1))
    refusal = engine.add_request(EngineRequest("a", [5, 6], greedy(1), images=(span,)))
    assert refusal is not None
    assert refusal.failure is not None
    assert refusal.failure.code == "invalid_request"
    assert "text only" in refusal.failure.message
    assert not engine.has_work
