"""Greedy tokens of Idefics3 and SmolVLM equal transformers', however tiles are batched, cut, preempted or cached."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy
from reference_idefics3 import (
    FAMILIES,
    IMAGE_TOKEN,
    TEXT_TOKENS,
    Reference,
    reference_arguments,
    save_idefics3,
)
from safetensors.torch import load_file, save_file
from vision_driver import (
    PICTURE_SIZES,
    ImagePrompt,
    PatchStore,
    Picture,
    build_prompt,
    patch_store,
    random_picture,
    random_text,
    reference_greedy,
    run_with_images,
)

from mmserve.engine.engine import Engine
from mmserve.request import ImageSpan
from mmserve.vision.preprocess import PixelLimits

NUM_TOKENS = 32
Pieces = list[list[int] | Picture]


@dataclass
class Case:
    """A family's checkpoint, prompts with 0, 1 and 3 images of all sizes, and the reference's answers."""

    reference: Reference
    store: PatchStore
    pieces: list[Pieces]
    prompts: list[ImagePrompt]
    answers: list[list[int]]

    def engine(self, **settings: Any) -> Engine:
        return Engine(engine_config(self.reference.folder, **settings))

    def prompt(self, pieces: Pieces) -> ImagePrompt:
        return build_prompt(pieces, IMAGE_TOKEN, self.store)

    def answer(self, pieces: Pieces) -> list[int]:
        return self.reference.answer(pieces, NUM_TOKENS)


def text(seed: int, length: int) -> list[int]:
    return random_text(seed, length, TEXT_TOKENS)


def all_pieces(reference: Reference) -> list[Pieces]:
    """Pictures of all sizes, a grey one, and one whose limit leaves no tile but the overview."""
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    stamp, photo, screen, page, banner, dot = (reference.picture(image) for image in images)
    grey = reference.picture(random_picture(9, 150, 90, grey=True), PixelLimits(max_pixels=1))
    return [
        [text(0, 25)],
        [text(1, 7), screen, text(2, 9)],
        [text(3, 5), photo, stamp, text(4, 3), page, text(5, 6)],
        [banner, text(6, 2), dot, text(7, 4), grey],
        [text(8, 40)],
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family = request.param
    reference = Reference(family, save_idefics3(family, tmp_path_factory.mktemp(family)))
    pieces = all_pieces(reference)
    answers = [reference.answer(parts, NUM_TOKENS) for parts in pieces]
    with patch_store() as store:
        yield Case(reference, store, pieces, [build_prompt(p, IMAGE_TOKEN, store) for p in pieces], answers)


def blank(picture: Picture) -> Picture:
    """The same tiles without anything on them; transformers takes pixels of exactly 0 for padding."""
    items = [
        replace(item, patches=replace(item.patches, pixels=torch.full_like(item.patches.pixels, 1e-6)))
        for item in picture.items
    ]
    return replace(picture, items=items)


def test_checkpoint_can_show_a_fault(case: Case) -> None:
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
    token_ids, vision = reference_arguments(case.pieces[1])
    rolled = {"pixel_values": vision["pixel_values"].roll(1, 1)}
    assert reference_greedy(case.reference.model, token_ids, NUM_TOKENS, rolled) != case.answers[1]


def test_checkpoint_shows_a_lost_layer_or_shuffle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.reference.model.model
    with monkeypatch.context() as patched:
        patched.setattr(model.vision_model.encoder.layers[1].self_attn, "forward", lambda hidden_states, **_: (0, None))
        assert case.answer(case.pieces[2]) != case.answers[2]
    with monkeypatch.context() as patched:
        shuffle = model.connector.pixel_shuffle
        patched.setattr(model.connector, "pixel_shuffle", lambda x, factor: shuffle(x, factor).flip(1))
        assert case.answer(case.pieces[2]) != case.answers[2]


def test_every_tile_is_an_image_of_its_own(case: Case) -> None:
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


def test_alone(case: Case) -> None:
    engine = case.engine(prefix_caching=False)
    for prompt, answer in zip(case.prompts, case.answers, strict=True):
        assert run_with_images(engine, [prompt], greedy(NUM_TOKENS)) == [answer]


def test_in_a_batch_with_text(case: Case) -> None:
    engine = case.engine()
    assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers
    kept = [entry.embeddings for entry in engine.scheduler.images.cache._entries.values()]
    assert len(kept) == len({image.content_hash for prompt in case.prompts for image in prompt.images})
    assert all(embeddings.untyped_storage().nbytes() == embeddings.nbytes for embeddings in kept)


def test_chunked_at_16(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens=16)
    cuts: list[int] = []
    spans = {str(i): prompt.images for i, prompt in enumerate(case.prompts)}

    def note_cuts(engine: Engine) -> None:
        cuts.extend(
            1
            for sequence in engine.scheduler.running
            if _inside(spans[sequence.request_id], sequence.num_computed_tokens)
        )

    answers = run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=note_cuts)
    assert answers == case.answers
    assert len(cuts) >= 3


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_preemption_inside_an_image(case: Case, prefix_caching: bool) -> None:
    """Whenever the newest sequence stands inside a tile it loses its blocks, up to three times."""
    engine = case.engine(block_size=2, max_num_batched_tokens=11, prefix_caching=prefix_caching, num_blocks=1024)
    inside: Counter[str] = Counter()

    def preempt_newest(engine: Engine) -> None:
        for sequence in engine.scheduler.running[-1:]:
            if _inside(sequence.images, sequence.num_computed_tokens) and inside[sequence.request_id] < 3:
                inside[sequence.request_id] += 1
                engine.scheduler._preempt(sequence)

    assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=preempt_newest) == case.answers
    assert set(inside) == {"1", "2", "3"}


@pytest.mark.parametrize("keeps_embeddings", [True, False])
def test_prefix_hit_that_ends_inside_an_image(case: Case, keeps_embeddings: bool) -> None:
    """Blocks of 3 tokens end inside the last tile for some length of the text before it."""
    engine = case.engine(block_size=3, encoder_cache_tokens=32768 if keeps_embeddings else 16)
    screen = case.pieces[1][1]
    length = next(n for n in range(3, 9) if _hit_ends_inside(case.prompt([text(1, n), screen]), 3))
    run_with_images(engine, [case.prompt([text(1, length), screen, text(2, 9)])], greedy(4))
    if not keeps_embeddings:
        run_with_images(engine, [case.prompts[2]], greedy(1))
    cached: list[int] = []
    # Differs from the first right after the last tile's tokens.
    question: Pieces = [text(1, length), Picture(screen.placeholder_ids[:-1], screen.items), text(20, 12)]  # type: ignore[union-attr]
    prompt = case.prompt(question)
    answers = run_with_images(
        engine, [prompt], greedy(NUM_TOKENS), after_step=lambda e: cached.extend(_cached_tokens(e))
    )
    assert answers == [case.answer(question)]
    assert prompt.images[-1].offset < cached[0] < prompt.images[-1].end


def _hit_ends_inside(prompt: ImagePrompt, block_size: int) -> bool:
    last = prompt.images[-1]
    return last.offset < last.end // block_size * block_size < last.end


@pytest.mark.parametrize("settings", [{"encoder_cache_tokens": 20}, {"max_encoder_tokens": 1}], ids=str)
def test_encoder_without_room_for_all_tiles(case: Case, settings: dict[str, int]) -> None:
    for chunk in (2048, 24):
        engine = case.engine(max_num_batched_tokens=chunk, **settings)
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers


def test_one_page_in_two_requests_is_encoded_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.engine()
    encoded: list[bytes] = []
    put = engine._runner.encoder_cache.put

    def noted(key: bytes, embeddings: torch.Tensor) -> None:
        encoded.append(key)
        put(key, embeddings)

    monkeypatch.setattr(engine._runner.encoder_cache, "put", noted)
    questions: list[Pieces] = [[text(40, 3), case.pieces[1][1], text(seed, 6)] for seed in (41, 42)]
    answers = run_with_images(engine, [case.prompt(q) for q in questions], greedy(NUM_TOKENS))
    assert answers == [case.answer(question) for question in questions]
    assert len(encoded) == len({image.content_hash for image in case.prompts[1].images})


def test_two_images_behind_the_same_text_share_nothing(case: Case) -> None:
    """The picture of another page, of the same shape: the blocks before it are shared, none with it."""
    engine = case.engine(block_size=1)
    other = case.reference.picture(random_picture(77, 640, 480))
    pieces: Pieces = [case.pieces[1][0], other, case.pieces[1][2]]
    assert other.placeholder_ids == case.pieces[1][1].placeholder_ids  # type: ignore[union-attr]
    cached: list[int] = []

    def run(prompt: ImagePrompt) -> list[int]:
        cached.clear()
        return run_with_images(
            engine, [prompt], greedy(NUM_TOKENS), after_step=lambda e: cached.extend(_cached_tokens(e))
        )[0]

    assert run(case.prompts[1]) == case.answers[1]
    assert run(case.prompt(pieces)) == case.answer(pieces) != case.answers[1]
    assert cached[0] == case.prompts[1].images[0].offset
    assert run(case.prompts[1]) == case.answers[1]
    assert cached[0] >= case.prompts[1].images[-1].end


def test_a_wrong_engine_is_caught(case: Case) -> None:
    """The comparison itself works: each picture's tiles in the wrong order give other tokens."""
    engine, images = case.engine(max_num_batched_tokens=16), case.prompts[2].images
    swapped = tuple(
        replace(image, content_hash=other.content_hash, patches=other.patches)
        for image, other in zip(images, reversed(images), strict=True)
    )
    wrong = replace(case.prompts[2], images=swapped)
    assert run_with_images(engine, [wrong], greedy(NUM_TOKENS)) != [case.answers[2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_in_shards_with_a_tied_head(tmp_path: Path, family: str) -> None:
    """Published checkpoints have the names that transformers saves, and store a tied head as well."""
    reference = Reference(family, save_idefics3(family, tmp_path / "saved", tied=True, max_shard_size="60KB"))
    files = sorted(reference.folder.glob("*.safetensors"))
    assert len(files) > 1
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert {name.split(".")[1] for name in weights} == {"vision_model", "connector", "text_model"}
    shutil.copytree(reference.folder, tmp_path / "stored", ignore=shutil.ignore_patterns("*.safetensors*"))
    head = weights["model.text_model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, tmp_path / "stored" / "model.safetensors")
    pieces = all_pieces(reference)[1]
    for folder in (reference.folder, tmp_path / "stored"):
        with patch_store() as store:
            prompt = build_prompt(pieces, IMAGE_TOKEN, store)
            answers = run_with_images(Engine(engine_config(folder)), [prompt], greedy(NUM_TOKENS))
        assert answers == [reference.answer(pieces, NUM_TOKENS)]


def _inside(images: tuple[ImageSpan, ...], num_computed_tokens: int) -> bool:
    return any(image.offset < num_computed_tokens < image.end for image in images)


def _cached_tokens(engine: Engine) -> list[int]:
    return [sequence.num_cached_prompt_tokens for sequence in engine.scheduler.running]
