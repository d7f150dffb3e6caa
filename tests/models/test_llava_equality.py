"""Greedy tokens of the LLaVA models equal transformers', however images are batched, cut, preempted or cached."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy
from reference_llava import (
    FAMILIES,
    IMAGE_TOKEN,
    TEXT_TOKENS,
    VARIANTS,
    Reference,
    reference_arguments,
    save_llava,
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
from mmserve.request import ImageSpan, Sequence

NUM_TOKENS = 32
Pieces = list[list[int] | Picture]


@dataclass
class Case:
    """A family's checkpoint, prompts with 0, 1 and 3 images of all sizes, and the reference's answers."""

    name: str
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

    @property
    def largest_image(self) -> int:
        return max(image.length for prompt in self.prompts for image in prompt.images)

    @property
    def has_tiles(self) -> bool:
        return self.name != "llava"


def text(seed: int, length: int) -> list[int]:
    return random_text(seed, length, TEXT_TOKENS)


def all_pieces(reference: Reference) -> list[Pieces]:
    """Pictures of all sizes, and a grey one."""
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    images.append(random_picture(9, 150, 90, grey=True))
    stamp, photo, screen, page, banner, dot, grey = (reference.picture(image) for image in images)
    return [
        [text(0, 25)],
        [text(1, 7), screen, text(2, 9)],
        [text(3, 5), photo, stamp, text(4, 3), page, text(5, 6)],
        [banner, text(6, 2), dot, text(7, 4), grey],
        [text(8, 40)],
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family = FAMILIES[request.param]
    reference = Reference(family, save_llava(family, tmp_path_factory.mktemp(request.param)))
    pieces = all_pieces(reference)
    answers = [reference.answer(parts, NUM_TOKENS) for parts in pieces]
    with patch_store() as store:
        prompts = [build_prompt(parts, IMAGE_TOKEN, store) for parts in pieces]
        yield Case(request.param, reference, store, pieces, prompts, answers)


def altered(case: Case, index: int, **changes: Any) -> list[int]:
    """The reference's answer to a prompt whose arguments are changed."""
    token_ids, vision = reference_arguments(case.pieces[index])
    return reference_greedy(case.reference.model, token_ids, NUM_TOKENS, {**vision, **changes})


def test_checkpoint_can_show_a_fault(case: Case) -> None:
    """A swapped or lost image, a moved patch and another layer change the tokens of the reference itself."""
    for index in (1, 2, 3):
        assert len(set(case.answers[index])) >= 8
        pieces = [piece for piece in case.pieces[index] if isinstance(piece, Picture)]
        _, vision = reference_arguments(case.pieces[index])
        start = 0
        for picture in pieces:
            stop = start + picture.items[0].patches.pixels.shape[0]
            pixels = vision["pixel_values"].clone()
            pixels[start:stop] = 0.0
            assert altered(case, index, pixel_values=pixels) != case.answers[index]
            start = stop
    _, vision = reference_arguments(case.pieces[2])
    assert altered(case, 2, pixel_values=vision["pixel_values"].roll(14, 3)) != case.answers[2]
    assert altered(case, 2, vision_feature_layer=1) != case.answers[2]
    before, photo, stamp, between, page, after = case.pieces[2]
    assert case.answer([before, page, stamp, between, photo, after]) != case.answers[2]


def test_checkpoint_shows_lost_newlines_and_moved_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if not case.has_tiles:
        assert not hasattr(case.reference.model.model, "image_newline")
        return
    _, vision = reference_arguments(case.pieces[1])
    pixels = vision["pixel_values"].clone()
    pixels[1:] = pixels[1:].roll(1, 0)
    assert altered(case, 1, pixel_values=pixels) != case.answers[1]
    newline = case.reference.model.model.image_newline
    monkeypatch.setattr(newline, "data", torch.zeros_like(newline))
    assert case.answer(case.pieces[2]) != case.answers[2]


def test_alone(case: Case) -> None:
    engine = case.engine(prefix_caching=False)
    for prompt, answer in zip(case.prompts, case.answers, strict=True):
        assert run_with_images(engine, [prompt], greedy(NUM_TOKENS)) == [answer]


def test_in_a_batch_with_text(case: Case) -> None:
    engine = case.engine()
    assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers
    kept = [entry.embeddings for entry in engine.scheduler.images.cache._entries.values()]
    assert len(kept) == 7
    assert all(embeddings.untyped_storage().nbytes() == embeddings.nbytes for embeddings in kept)


def test_chunked_at_16(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens=16)
    cuts: list[str] = []

    def note_cuts(engine: Engine) -> None:
        running = engine.scheduler.running
        cuts.extend(s.request_id for s in running if _inside(s.images, s.num_computed_tokens))

    answers = run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=note_cuts)
    assert answers == case.answers
    assert len(cuts) >= 3


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_preemption_inside_an_image(case: Case, prefix_caching: bool) -> None:
    """Whenever the newest sequence stands inside an image it loses its blocks, up to three times."""
    engine = case.engine(block_size=2, max_num_batched_tokens=11, prefix_caching=prefix_caching, num_blocks=1024)
    inside: Counter[str] = Counter()

    def preempt_newest(engine: Engine) -> None:
        for sequence in engine.scheduler.running[-1:]:
            if _inside(sequence.images, sequence.num_computed_tokens) and inside[sequence.request_id] < 3:
                inside[sequence.request_id] += 1
                engine.scheduler._preempt(sequence)

    assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=preempt_newest) == case.answers
    assert set(inside) == {"1", "2", "3"}


def test_with_hardly_any_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool hardly larger than the longest prompt needs, so that what comes last loses its blocks again and again."""
    num_blocks = -(-(max(len(prompt.token_ids) for prompt in case.prompts) + NUM_TOKENS) // 4)
    inside: list[str] = []
    for spare in (8, 20, 26):
        engine = case.engine(num_blocks=num_blocks + spare, block_size=4, max_num_batched_tokens=16)
        preempt = engine.scheduler._preempt

        def noted(sequence: Sequence, preempt: Callable[[Sequence], None] = preempt) -> None:
            if _inside(sequence.images, sequence.num_computed_tokens):
                inside.append(sequence.request_id)
            preempt(sequence)

        monkeypatch.setattr(engine.scheduler, "_preempt", noted)
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers
    assert inside


@pytest.mark.parametrize("keeps_embeddings", [True, False])
def test_prefix_hit_that_ends_inside_an_image(case: Case, keeps_embeddings: bool) -> None:
    engine = case.engine(encoder_cache_tokens=32768 if keeps_embeddings else case.largest_image)
    run_with_images(engine, [case.prompts[1]], greedy(4))
    if not keeps_embeddings:
        run_with_images(engine, [case.prompts[2]], greedy(1))
    image = case.prompts[1].images[0]
    before = engine.scheduler.images.cache.num_hits
    question: Pieces = [*case.pieces[1][:2], text(20, 12)]
    cached: list[int] = []
    answers = run_with_images(
        engine, [case.prompt(question)], greedy(NUM_TOKENS), after_step=lambda e: cached.extend(_cached_tokens(e))
    )
    assert answers == [case.answer(question)]
    assert image.offset < cached[0] < image.end
    assert engine.scheduler.images.cache.num_hits - before == int(keeps_embeddings)


@pytest.mark.parametrize("limit", ["encoder_cache_tokens", "max_encoder_tokens"])
def test_encoder_without_room_for_all_images(case: Case, limit: str) -> None:
    tokens = case.largest_image if limit == "encoder_cache_tokens" else 1
    for chunk in (2048, 24):
        engine = case.engine(max_num_batched_tokens=chunk, **{limit: tokens})
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers


def test_two_images_behind_the_same_text_share_nothing(case: Case) -> None:
    """The image of another page, of the same shape: the block before it is shared, none with it."""
    engine = case.engine(block_size=4)
    other = case.reference.picture(random_picture(77, 640, 480))
    pieces: Pieces = [case.pieces[1][0], other, case.pieces[1][2]]
    cached: list[int] = []

    def run(prompt: ImagePrompt) -> list[int]:
        cached.clear()
        return run_with_images(
            engine, [prompt], greedy(NUM_TOKENS), after_step=lambda e: cached.extend(_cached_tokens(e))
        )[0]

    assert case.prompt(pieces).token_ids == case.prompts[1].token_ids
    assert run(case.prompts[1]) == case.answers[1]
    assert run(case.prompt(pieces)) == case.answer(pieces) != case.answers[1]
    assert cached[0] == 4 < case.prompts[1].images[0].offset
    assert run(case.prompts[1]) == case.answers[1]
    assert cached[0] > case.prompts[1].images[0].end - 4


def test_a_wrong_engine_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself works: embeddings one row off give other tokens."""
    engine = case.engine(max_num_batched_tokens=16)
    get = engine._runner.encoder_cache.get
    monkeypatch.setattr(engine._runner.encoder_cache, "get", lambda key: get(key).roll(1, 0))
    assert run_with_images(engine, [case.prompts[2]], greedy(NUM_TOKENS)) != [case.answers[2]]


@pytest.mark.parametrize("name", VARIANTS)
def test_other_towers_layers_and_decoders(tmp_path: Path, name: str) -> None:
    reference = Reference(VARIANTS[name], save_llava(VARIANTS[name], tmp_path, seed=1))
    pieces = all_pieces(reference)
    answers = [reference.answer(parts, NUM_TOKENS) for parts in pieces]
    assert min(len(set(answer)) for answer in answers) >= 5
    with patch_store() as store:
        prompts = [build_prompt(parts, IMAGE_TOKEN, store) for parts in pieces]
        engine = Engine(engine_config(tmp_path, max_num_batched_tokens=48))
        assert run_with_images(engine, prompts, greedy(NUM_TOKENS)) == answers


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
    shutil.copytree(reference.folder, tmp_path / "renamed", ignore=shutil.ignore_patterns("*.safetensors*"))
    files = sorted(reference.folder.glob("*.safetensors"))
    assert len(files) > 1
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    renamed = {_named(name, *_NAMES[names]): tensor for name, tensor in weights.items()}
    renamed[f"{_NAMES[names][3]}embeddings.position_ids"] = torch.arange(16)[None]
    save_file(renamed, tmp_path / "renamed" / "model.safetensors")
    pieces = all_pieces(reference)[1]
    for folder in (reference.folder, tmp_path / "renamed"):
        with patch_store() as store:
            prompt = build_prompt(pieces, IMAGE_TOKEN, store)
            answers = run_with_images(Engine(engine_config(folder)), [prompt], greedy(NUM_TOKENS))
        assert answers == [reference.answer(pieces, NUM_TOKENS)]


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


def _inside(images: tuple[ImageSpan, ...], num_computed_tokens: int) -> bool:
    return any(image.offset < num_computed_tokens < image.end for image in images)


def _cached_tokens(engine: Engine) -> list[int]:
    return [sequence.num_cached_prompt_tokens for sequence in engine.scheduler.running]
