"""Greedy tokens of the LLaVA models equal transformers', however images are batched, cut, preempted or cached."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import greedy
from reference_llava import FAMILIES, IMAGE_TOKEN, VARIANTS, Reference, save_llava
from vision_driver import Picture, run_with_images
from vision_equality import (
    NUM_TOKENS,
    Case,
    VisionEquality,
    all_pieces,
    check_folders,
    open_case,
    pictures,
    shards,
    with_weights,
)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case[Reference]]:
    family = FAMILIES[request.param]
    reference = Reference(family, save_llava(family, tmp_path_factory.mktemp(request.param)))
    with open_case(reference, IMAGE_TOKEN, all_pieces(pictures(reference))) as case:
        yield case


class TestLlava(VisionEquality):
    spare_blocks = (8, 20, 26)


def test_checkpoint_can_show_a_fault(case: Case[Reference]) -> None:
    """A swapped or lost image, a moved patch and another layer change the tokens of the reference itself."""
    for index in (1, 2, 3):
        pieces, answer = case.pieces[index], case.answers[index]
        assert len(set(answer)) >= 8
        start = 0
        for picture in (piece for piece in pieces if isinstance(piece, Picture)):
            stop = start + picture.items[0].patches.pixels.shape[0]
            pixels = case.reference.vision_arguments(pieces)["pixel_values"].clone()
            pixels[start:stop] = 0.0
            assert case.answer(pieces, pixel_values=pixels) != answer
            start = stop
    pieces, answer = case.pieces[2], case.answers[2]
    moved = case.reference.vision_arguments(pieces)["pixel_values"].roll(14, 3)
    assert case.answer(pieces, pixel_values=moved) != answer
    assert case.answer(pieces, vision_feature_layer=1) != answer
    before, photo, stamp, between, page, after = pieces
    assert case.answer([before, page, stamp, between, photo, after]) != answer


def test_checkpoint_shows_lost_newlines_and_moved_tiles(case: Case[Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    if case.reference.class_prefix == "Llava":
        assert not hasattr(case.reference.model.model, "image_newline")
        return
    pixels = case.reference.vision_arguments(case.pieces[1])["pixel_values"].clone()
    pixels[1:] = pixels[1:].roll(1, 0)
    assert case.answer(case.pieces[1], pixel_values=pixels) != case.answers[1]
    newline = case.reference.model.model.image_newline
    monkeypatch.setattr(newline, "data", torch.zeros_like(newline))
    assert case.answer(case.pieces[2]) != case.answers[2]


@pytest.mark.parametrize("name", VARIANTS)
def test_other_towers_layers_and_decoders(tmp_path: Path, name: str) -> None:
    reference = Reference(VARIANTS[name], save_llava(VARIANTS[name], tmp_path, seed=1))
    with open_case(reference, IMAGE_TOKEN, all_pieces(pictures(reference))) as case:
        assert min(len(set(answer)) for answer in case.answers) >= 5
        engine = case.engine(max_num_batched_tokens=48)
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers


_NAMES = {
    "as published": ("language_model.model.", "language_model.lm_head.", "", "vision_tower.vision_model."),
    "as in memory": ("model.language_model.", "lm_head.", "model.", "model.vision_tower.vision_model."),
    "as saved today": ("model.language_model.", "lm_head.", "model.", "model.vision_tower."),
}


@pytest.mark.parametrize("names", _NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_every_generation_of_checkpoints(tmp_path: Path, family: str, names: str) -> None:
    """In shards as well; with buffers that old files carry."""
    reference = Reference(FAMILIES[family], save_llava(FAMILIES[family], tmp_path / "saved", max_shard_size="60KB"))
    renamed = {_named(name, *_NAMES[names]): tensor for name, tensor in shards(reference.folder).items()}
    renamed[f"{_NAMES[names][3]}embeddings.position_ids"] = torch.arange(16)[None]
    check_folders(reference, IMAGE_TOKEN, with_weights(reference.folder, tmp_path / "renamed", renamed))


def _named(name: str, decoder: str, head: str, rest: str, tower: str) -> str:
    bare = name.removeprefix("model.")
    for known, wanted in (
        ("language_model.model.", decoder),
        ("language_model.lm_head.", head),
        ("vision_tower.", tower),
        ("", rest),
    ):
        if bare.startswith(known):
            return wanted + bare.removeprefix(known)
    raise AssertionError(name)
