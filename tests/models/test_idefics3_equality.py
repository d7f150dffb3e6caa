"""Greedy tokens of Idefics3 and SmolVLM equal transformers', however tiles are batched, cut, preempted or cached."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import greedy
from reference_idefics3 import FAMILIES, IMAGE_TOKEN, Reference, save_idefics3
from vision_driver import ImagePrompt, Picture, random_picture, run_with_images
from vision_equality import (
    NUM_TOKENS,
    Case,
    Pieces,
    VisionEquality,
    all_pieces,
    check_folders,
    open_case,
    pictures,
    run_alone,
    shards,
    text,
    with_weights,
)

from mmserve.vision.image_source import PixelLimits


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case[Reference]]:
    """The limit of the grey picture leaves no tile but the overview."""
    family = request.param
    reference = Reference(family, save_idefics3(family, tmp_path_factory.mktemp(family)))
    grey = reference.picture(random_picture(9, 150, 90, grey=True), PixelLimits(max_pixels=1))
    with open_case(reference, IMAGE_TOKEN, all_pieces([*pictures(reference)[:-1], grey])) as case:
        yield case


class TestIdefics3(VisionEquality):
    block_size = 1
    spare_blocks = (6, 14, 20)

    def few_encoder_tokens(self, case: Case[Any]) -> int:
        return 20

    @pytest.mark.parametrize("keeps_embeddings", [True, False])
    def test_prefix_hit_that_ends_inside_an_image(self, case: Case[Any], keeps_embeddings: bool) -> None:
        """Blocks of 3 tokens end inside the last tile for some length of the text before it."""
        engine = case.engine(block_size=3, encoder_cache_tokens=32768 if keeps_embeddings else 16)
        screen = case.pieces[1][1]
        assert isinstance(screen, Picture)
        length = next(n for n in range(3, 9) if _hit_ends_inside(case.prompt([text(1, n), screen]), 3))
        run_with_images(engine, [case.prompt([text(1, length), screen, text(2, 9)])], greedy(4))
        if not keeps_embeddings:
            run_with_images(engine, [case.prompts[2]], greedy(1))
        # Differs from the first right after the last tile's tokens.
        question: Pieces = [text(1, length), Picture(screen.placeholder_ids[:-1], screen.items), text(20, 12)]
        prompt = case.prompt(question)
        answer, num_cached = run_alone(engine, prompt)
        assert answer == case.answer(question)
        assert prompt.images[-1].offset < num_cached < prompt.images[-1].end

    def test_a_wrong_engine_is_caught(self, case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The comparison itself works: each picture's tiles in the wrong order give other tokens."""
        engine, images = case.engine(max_num_batched_tokens=16), case.prompts[2].images
        swapped = tuple(
            replace(image, content_hash=other.content_hash, patches=other.patches)
            for image, other in zip(images, reversed(images), strict=True)
        )
        wrong = replace(case.prompts[2], images=swapped)
        assert run_with_images(engine, [wrong], greedy(NUM_TOKENS)) != [case.answers[2]]


def _hit_ends_inside(prompt: ImagePrompt, block_size: int) -> bool:
    last = prompt.images[-1]
    return last.offset < last.end // block_size * block_size < last.end


def blank(picture: Picture) -> Picture:
    """The same tiles without anything on them; transformers takes pixels of exactly 0 for padding."""
    items = [
        replace(item, patches=replace(item.patches, pixels=torch.full_like(item.patches.pixels, 1e-6)))
        for item in picture.items
    ]
    return replace(picture, items=items)


def test_checkpoint_can_show_a_fault(case: Case[Reference]) -> None:
    """A swapped or lost image or tile changes the tokens of the reference itself."""
    for index in (1, 2, 3):
        assert len(set(case.answers[index])) >= 8
        for position, piece in enumerate(case.pieces[index]):
            if isinstance(piece, Picture):
                lost = [*case.pieces[index]]
                lost[position] = blank(piece)
                assert case.answer(lost) != case.answers[index]
    before, first, second, *after = case.pieces[2]
    assert case.answer([before, second, first, *after]) != case.answers[2]
    rolled = case.reference.vision_arguments(case.pieces[1])["pixel_values"].roll(1, 1)
    assert case.answer(case.pieces[1], pixel_values=rolled) != case.answers[1]


def test_checkpoint_shows_a_lost_layer_or_shuffle(case: Case[Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.reference.model.model
    with monkeypatch.context() as patched:
        patched.setattr(model.vision_model.encoder.layers[1].self_attn, "forward", lambda hidden_states, **_: (0, None))
        assert case.answer(case.pieces[2]) != case.answers[2]
    with monkeypatch.context() as patched:
        shuffle = model.connector.pixel_shuffle
        patched.setattr(model.connector, "pixel_shuffle", lambda x, factor: shuffle(x, factor).flip(1))
        assert case.answer(case.pieces[2]) != case.answers[2]


def test_every_tile_is_an_image_of_its_own(case: Case[Reference]) -> None:
    shape = FAMILIES[case.reference.family]
    tokens_a_tile = (shape.side // shape.patch_size // shape.scale_factor) ** 2
    page = case.pieces[2][4]
    assert isinstance(page, Picture)
    assert len(page.items) > 4
    assert len(case.prompts[0].images) == 0
    assert len(case.prompts[3].images) == sum(len(p.items) for p in case.pieces[3] if isinstance(p, Picture))
    for prompt in case.prompts:
        for image in prompt.images:
            assert image.length == tokens_a_tile
            run = prompt.token_ids[image.offset - 1 : image.end + 1]
            assert [token == IMAGE_TOKEN for token in run] == [False, *[True] * tokens_a_tile, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_in_shards_with_a_tied_head(tmp_path: Path, family: str) -> None:
    """Published checkpoints have the names that transformers saves, and store a tied head as well."""
    reference = Reference(family, save_idefics3(family, tmp_path / "saved", tied=True, max_shard_size="60KB"))
    weights = shards(reference.folder)
    assert {name.split(".")[1] for name in weights} == {"vision_model", "connector", "text_model"}
    stored = {**weights, "lm_head.weight": weights["model.text_model.embed_tokens.weight"].clone()}
    check_folders(reference, IMAGE_TOKEN, with_weights(reference.folder, tmp_path / "stored", stored))
