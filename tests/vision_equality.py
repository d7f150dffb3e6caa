"""Tests of every vision-language model: greedy tokens equal transformers', however images are batched, cut or cached.

A family's tests make a fixture `case`, and a subclass of `VisionEquality`.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from engine_driver import engine_config, greedy
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
    run_with_images,
)
from vision_reference import TEXT_TOKENS, VisionReference

from mmserve.engine.engine import Engine
from mmserve.request import Sequence as EngineSequence

NUM_TOKENS = 32
Pieces = list[list[int] | Picture]
R = TypeVar("R", bound=VisionReference)


@dataclass
class Case(Generic[R]):
    """A family's checkpoint, prompts with 0, 1 and 3 images of all sizes, and the reference's answers."""

    reference: R
    image_token_id: int
    store: PatchStore
    pieces: list[Pieces]
    prompts: list[ImagePrompt]
    answers: list[list[int]]

    def engine(self, **settings: Any) -> Engine:
        return Engine(engine_config(self.reference.folder, **settings))

    def prompt(self, pieces: Pieces) -> ImagePrompt:
        return build_prompt(pieces, self.image_token_id, self.store)

    def answer(self, pieces: Pieces, **changes: Any) -> list[int]:
        return self.reference.answer(pieces, NUM_TOKENS, **changes)

    @property
    def largest_image(self) -> int:
        return max(image.length for prompt in self.prompts for image in prompt.images)


@contextmanager
def open_case(reference: R, image_token_id: int, pieces: list[Pieces]) -> Iterator[Case[R]]:
    answers = [reference.answer(parts, NUM_TOKENS) for parts in pieces]
    with patch_store() as store:
        prompts = [build_prompt(parts, image_token_id, store) for parts in pieces]
        yield Case(reference, image_token_id, store, pieces, prompts, answers)


def text(seed: int, length: int) -> list[int]:
    return random_text(seed, length, TEXT_TOKENS)


def pictures(reference: VisionReference) -> list[Picture]:
    """One of each size, and a grey one."""
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    return [reference.picture(image) for image in [*images, random_picture(9, 150, 90, grey=True)]]


def all_pieces(pictures: Sequence[Picture]) -> list[Pieces]:
    stamp, photo, screen, page, banner, dot, grey = pictures
    return [
        [text(0, 25)],
        [text(1, 7), screen, text(2, 9)],
        [text(3, 5), photo, stamp, text(4, 3), page, text(5, 6)],
        [banner, text(6, 2), dot, text(7, 4), grey],
        [text(8, 40)],
    ]


class VisionEquality:
    """`block_size` is that of the tests whose blocks end inside an image; `spare_blocks` make the pool too small."""

    block_size: ClassVar[int] = 4
    spare_blocks: ClassVar[tuple[int, ...]]

    def few_encoder_tokens(self, case: Case[Any]) -> int:
        """Room for the largest image, but not for all of a prompt."""
        return case.largest_image

    def test_alone(self, case: Case[Any]) -> None:
        engine = case.engine(prefix_caching=False)
        for prompt, answer in zip(case.prompts, case.answers, strict=True):
            assert run_with_images(engine, [prompt], greedy(NUM_TOKENS)) == [answer]

    def test_in_a_batch_with_text(self, case: Case[Any]) -> None:
        engine = case.engine()
        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers
        kept = [entry.embeddings for entry in engine.scheduler.images.cache._entries.values()]
        assert len(kept) == len({image.content_hash for prompt in case.prompts for image in prompt.images}) >= 7
        assert all(embeddings.untyped_storage().nbytes() == embeddings.nbytes for embeddings in kept)

    def test_chunked_at_16(self, case: Case[Any]) -> None:
        engine = case.engine(max_num_batched_tokens=16)
        cuts: list[str] = []

        def note_cuts(engine: Engine) -> None:
            cuts.extend(sequence.request_id for sequence in engine.scheduler.running if _is_inside_an_image(sequence))

        answers = run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=note_cuts)
        assert answers == case.answers
        assert len(cuts) >= 3

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_after_preemption_inside_an_image(self, case: Case[Any], prefix_caching: bool) -> None:
        """Whenever the newest sequence stands inside an image it loses its blocks, up to three times."""
        engine = case.engine(block_size=2, max_num_batched_tokens=11, prefix_caching=prefix_caching, num_blocks=1024)
        inside: Counter[str] = Counter()

        def preempt_newest(engine: Engine) -> None:
            for sequence in engine.scheduler.running[-1:]:
                if _is_inside_an_image(sequence) and inside[sequence.request_id] < 3:
                    inside[sequence.request_id] += 1
                    engine.scheduler._preempt(sequence)

        assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS), after_step=preempt_newest) == case.answers
        assert set(inside) == {"1", "2", "3"}

    def test_with_hardly_any_blocks(self, case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """A pool hardly larger than the longest prompt needs: what comes last loses its blocks again and again."""
        num_blocks = -(-(max(len(prompt.token_ids) for prompt in case.prompts) + NUM_TOKENS) // 4)
        inside: list[str] = []
        for spare in self.spare_blocks:
            engine = case.engine(num_blocks=num_blocks + spare, block_size=4, max_num_batched_tokens=16)
            preempt = engine.scheduler._preempt

            def noted(sequence: EngineSequence, preempt: Callable[[EngineSequence], None] = preempt) -> None:
                if _is_inside_an_image(sequence):
                    inside.append(sequence.request_id)
                preempt(sequence)

            monkeypatch.setattr(engine.scheduler, "_preempt", noted)
            assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers
        assert inside

    @pytest.mark.parametrize("keeps_embeddings", [True, False])
    def test_prefix_hit_that_ends_inside_an_image(self, case: Case[Any], keeps_embeddings: bool) -> None:
        engine = case.engine(encoder_cache_tokens=32768 if keeps_embeddings else self.few_encoder_tokens(case))
        run_with_images(engine, [case.prompts[1]], greedy(4))
        if not keeps_embeddings:
            run_with_images(engine, [case.prompts[2]], greedy(1))
        image = case.prompts[1].images[0]
        before = engine.scheduler.images.cache.num_hits
        question: Pieces = [*case.pieces[1][:2], text(20, 12)]
        answer, num_cached = run_alone(engine, case.prompt(question))
        assert answer == case.answer(question)
        assert image.offset < num_cached < image.end
        assert engine.scheduler.images.cache.num_hits - before == int(keeps_embeddings)

    @pytest.mark.parametrize("limit", ["encoder_cache_tokens", "max_encoder_tokens"])
    def test_encoder_without_room_for_all_images(self, case: Case[Any], limit: str) -> None:
        tokens = self.few_encoder_tokens(case) if limit == "encoder_cache_tokens" else 1
        for chunk in (2048, 24):
            engine = case.engine(max_num_batched_tokens=chunk, **{limit: tokens})
            assert run_with_images(engine, case.prompts, greedy(NUM_TOKENS)) == case.answers

    def test_one_page_in_two_requests_is_encoded_once(self, case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        engine = case.engine()
        encoded: list[bytes] = []
        put = engine._runner.encoder.cache.put

        def noted(key: bytes, embeddings: torch.Tensor) -> None:
            encoded.append(key)
            put(key, embeddings)

        monkeypatch.setattr(engine._runner.encoder.cache, "put", noted)
        questions: list[Pieces] = [[text(40, 3), case.pieces[1][1], text(seed, 6)] for seed in (41, 42)]
        num_images = len({image.content_hash for image in case.prompts[1].images})
        answers = run_with_images(engine, [case.prompt(q) for q in questions], greedy(NUM_TOKENS))
        assert answers == [case.answer(question) for question in questions]
        assert len(encoded) == num_images
        run_with_images(engine, [case.prompt(questions[0])], greedy(1))
        assert len(encoded) == num_images

    def test_two_images_behind_the_same_text_share_nothing(self, case: Case[Any]) -> None:
        """The image of another page, of the same shape: the blocks before it are shared, none with it."""
        engine, size = case.engine(block_size=self.block_size), self.block_size
        other = case.reference.picture(random_picture(77, 640, 480))
        pieces: Pieces = [case.pieces[1][0], other, case.pieces[1][2]]
        prompt, other_prompt = case.prompts[1], case.prompt(pieces)
        num_shared, num_known = (n // size * size for n in (prompt.images[0].offset, len(prompt.token_ids) - 1))
        assert other_prompt.token_ids == prompt.token_ids
        assert case.answer(pieces) != case.answers[1]
        assert num_shared > 0
        assert prompt.images[-1].end <= num_known
        assert run_alone(engine, prompt) == (case.answers[1], 0)
        assert run_alone(engine, other_prompt) == (case.answer(pieces), num_shared)
        assert run_alone(engine, prompt) == (case.answers[1], num_known)

    def test_a_wrong_engine_is_caught(self, case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The comparison itself works: embeddings one row off give other tokens."""
        engine = case.engine(max_num_batched_tokens=16)
        get = engine._runner.encoder.cache.get
        monkeypatch.setattr(engine._runner.encoder.cache, "get", lambda key: get(key).roll(1, 0))
        assert run_with_images(engine, [case.prompts[2]], greedy(NUM_TOKENS)) != [case.answers[2]]


def run_alone(engine: Engine, prompt: ImagePrompt) -> tuple[list[int], int]:
    """A prompt's tokens, and how many of its own came from the prefix cache."""
    num_cached: list[int] = []

    def note_cached(engine: Engine) -> None:
        num_cached.extend(sequence.num_cached_prompt_tokens for sequence in engine.scheduler.running)

    [answer] = run_with_images(engine, [prompt], greedy(NUM_TOKENS), after_step=note_cached)
    return answer, num_cached[0]


def _is_inside_an_image(sequence: EngineSequence) -> bool:
    return any(image.offset < sequence.num_computed_tokens < image.end for image in sequence.images)


def shards(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder that has several files of them."""
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def with_weights(folder: Path, target: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """A copy of `folder` whose weights are these, in one file."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(weights), target / "model.safetensors")
    return target


def check_folders(reference: VisionReference, image_token_id: int, *copies: Path) -> None:
    """The reference's folder and its copies give the reference's answer."""
    pieces = all_pieces(pictures(reference))[1]
    answer = reference.answer(pieces, NUM_TOKENS)
    for folder in (reference.folder, *copies):
        with patch_store() as store:
            prompt = build_prompt(pieces, image_token_id, store)
            assert run_with_images(Engine(engine_config(folder)), [prompt], greedy(NUM_TOKENS)) == [answer]
