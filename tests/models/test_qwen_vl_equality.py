"""Greedy tokens of the Qwen-VL models equal transformers', however images are batched, cut, preempted or cached."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy
from reference_models import save_reference_model
from reference_qwen_vl import FAMILIES, IMAGE_TOKEN, TEXT_TOKENS, Reference, reference_arguments, save_qwen_vl
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
from mmserve.engine.messages import EngineRequest
from mmserve.engine.scheduler import ScheduledBatch
from mmserve.request import ImageSpan, Sequence

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


def pictures(reference: Reference) -> list[Picture]:
    """One of each size, and a grey one."""
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    return [reference.picture(image) for image in [*images, random_picture(9, 150, 90, grey=True)]]


def all_pieces(reference: Reference) -> list[Pieces]:
    stamp, photo, screen, page, banner, dot, grey = pictures(reference)
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
    reference = Reference(family, save_qwen_vl(family, tmp_path_factory.mktemp(family)))
    pieces = all_pieces(reference)
    answers = [reference.answer(parts, NUM_TOKENS) for parts in pieces]
    with patch_store() as store:
        yield Case(reference, store, pieces, [build_prompt(p, IMAGE_TOKEN, store) for p in pieces], answers)


def altered(case: Case, index: int, **changes: torch.Tensor) -> list[int]:
    """The reference's answer to a prompt whose arguments are changed; None drops one."""
    token_ids, vision = reference_arguments(case.pieces[index])
    return reference_greedy(case.reference.model, token_ids, NUM_TOKENS, {**vision, **changes})


def test_checkpoint_can_show_a_fault(case: Case) -> None:
    """A swapped or lost image, and positions along one axis, change the tokens of the reference itself."""
    for index in (1, 2, 3):
        token_ids, vision = reference_arguments(case.pieces[index])
        assert len(set(case.answers[index])) >= 8
        one_axis = torch.arange(len(token_ids)).expand(3, 1, -1)
        assert altered(case, index, position_ids=one_axis) != case.answers[index]
        pixels = vision["pixel_values"].clone()
        pixels[: int(vision["image_grid_thw"][0].prod())] = 0.0
        assert altered(case, index, pixel_values=pixels) != case.answers[index]
    before, first, second, *after = case.pieces[2]
    assert case.answer([before, second, first, *after]) != case.answers[2]


def test_checkpoint_shows_lost_windows_or_features(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    visual = case.reference.model.model.visual
    if case.reference.family == "qwen2_5_vl":
        monkeypatch.setattr(visual, "fullatt_block_indexes", [0, 1, 2])
    elif case.reference.family == "qwen3_vl":
        monkeypatch.setattr(visual, "deepstack_visual_indexes", [])
    else:
        monkeypatch.setattr(visual.blocks[1].attn, "forward", lambda x, **_: x)
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


def test_after_preemption_inside_an_image(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool hardly larger than the longest prompt needs, so that what comes last loses its blocks again and again."""
    num_blocks = -(-(max(len(prompt.token_ids) for prompt in case.prompts) + NUM_TOKENS) // 4)
    inside: list[str] = []
    for spare in (6, 14, 20, 36):
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
    engine = case.engine(encoder_cache_tokens=32768 if keeps_embeddings else 64)
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


@pytest.mark.parametrize("settings", [{"encoder_cache_tokens": 55}, {"max_encoder_tokens": 1}], ids=str)
def test_encoder_without_room_for_all_images(case: Case, settings: dict[str, int]) -> None:
    for chunk in (2048, 24):
        engine = case.engine(max_num_batched_tokens=chunk, **settings)
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers


def test_an_image_that_returns_does_not_bar_the_way(case: Case) -> None:
    screen, page = case.pieces[1][1], case.pieces[2][4]
    pieces: Pieces = [text(30, 4), screen, text(31, 2), page, text(32, 2), screen, text(33, 3)]
    engine = case.engine(encoder_cache_tokens=55)
    assert run_with_images(engine, [case.prompt(pieces)], greedy(NUM_TOKENS)) == [case.answer(pieces)]


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
    assert len(encoded) == 1
    run_with_images(engine, [case.prompt(questions[0])], greedy(1))
    assert len(encoded) == 1


def test_two_images_behind_the_same_text_share_nothing(case: Case) -> None:
    """The image of another page, of the same shape: the blocks before it are shared, none with it."""
    engine = case.engine(block_size=4)
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
    assert cached[0] == case.prompts[1].images[0].offset == 8
    assert run(case.prompts[1]) == case.answers[1]
    assert cached[0] >= case.prompts[1].images[0].end


def test_a_wrong_engine_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself works: embeddings of the prompt's head in every chunk give other tokens."""
    engine = case.engine(max_num_batched_tokens=16)
    get = engine._runner.encoder_cache.get
    monkeypatch.setattr(engine._runner.encoder_cache, "get", lambda key: get(key).roll(1, 0))
    assert run_with_images(engine, [case.prompts[2]], greedy(NUM_TOKENS)) != [case.answers[2]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("vision", "text_model"), [("visual.", "model."), ("model.visual.", "model.language_model.")])
def test_names_of_every_generation_of_checkpoints(tmp_path: Path, family: str, vision: str, text_model: str) -> None:
    """As published with Qwen2-VL, and as published with Qwen3-VL; tied, in shards, the tied head stored as well."""
    reference = Reference(family, save_qwen_vl(family, tmp_path / "saved", tied=True, max_shard_size="60KB"))
    shutil.copytree(reference.folder, tmp_path / "renamed", ignore=shutil.ignore_patterns("*.safetensors*"))
    files = sorted(reference.folder.glob("*.safetensors"))
    assert len(files) > 1
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    renamed = {_named(name, vision, text_model): tensor for name, tensor in weights.items()}
    renamed["lm_head.weight"] = renamed[f"{text_model}embed_tokens.weight"].clone()
    save_file(renamed, tmp_path / "renamed" / "model.safetensors")
    pieces = all_pieces(reference)[1]
    for folder in (reference.folder, tmp_path / "renamed"):
        with patch_store() as store:
            prompt = build_prompt(pieces, IMAGE_TOKEN, store)
            answers = run_with_images(Engine(engine_config(folder)), [prompt], greedy(NUM_TOKENS))
        assert answers == [reference.answer(pieces, NUM_TOKENS)]


def _named(name: str, vision: str, text_model: str) -> str:
    bare = name.removeprefix("model.").removeprefix("language_model.")
    if bare.startswith("visual."):
        return vision + bare.removeprefix("visual.")
    return bare if bare.startswith("lm_head.") else text_model + bare


def test_a_step_without_tokens_is_harmless(case: Case) -> None:
    """When the newest sequence was the only one that could run, and had to give its blocks back."""
    assert case.engine()._runner.run(ScheduledBatch()) == {}


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    engine = Engine(engine_config(save_reference_model("qwen2", tmp_path)))
    span = ImageSpan(0, 1, b"image", (1, 1))
    refusal = engine.add_request(EngineRequest("a", [5, 6], greedy(1), images=(span,)))
    assert refusal is not None
    assert refusal.failure is not None
    assert refusal.failure.code == "invalid_request"
    assert "text only" in refusal.failure.message
    assert not engine.has_work


def _inside(images: tuple[ImageSpan, ...], num_computed_tokens: int) -> bool:
    return any(image.offset < num_computed_tokens < image.end for image in images)


def _cached_tokens(engine: Engine) -> list[int]:
    return [sequence.num_cached_prompt_tokens for sequence in engine.scheduler.running]
