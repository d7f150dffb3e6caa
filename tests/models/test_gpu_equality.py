"""Greedy tokens on a card equal the CPU's in float32, of text and of pictures, with CUDA graphs and without."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import reference_idefics3
import reference_llava
import reference_qwen_vl
import torch
from engine_driver import engine_config, greedy, run_to_end
from reference_models import FAMILIES, VOCAB_SIZE, save_reference_model
from vision_checkpoint import save_vision_model
from vision_driver import (
    PICTURE_SIZES,
    ImagePrompt,
    Picture,
    build_prompt,
    patch_store,
    random_picture,
    run_with_images,
)
from vision_equality import all_pieces, pictures, text
from vision_reference import VisionReference

from mmserve.config import EngineConfig, VisionConfig
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import PendingStep
from mmserve.engine.scheduler import ScheduledBatch
from mmserve.llm import LLM
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import unlink
from mmserve.vision.picture_ref import share_picture
from mmserve.vision.preprocess import load_processor
from mmserve.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_TOKENS = 24
MAX_NUM_SEQS = 32
RANDOM = random.Random(0)
Run = Callable[[Engine, Sequence[Any]], list[list[int]]]


def random_prompt(length: int) -> list[int]:
    return [RANDOM.randrange(3, VOCAB_SIZE) for _ in range(length)]


PROMPTS = [random_prompt(length) for length in (5, 16, 33, 70)]
# Enough sequences that begin with enough of the same blocks to be read together.
PREFIX_LENGTH = 300
_PREFIX = random_prompt(PREFIX_LENGTH)
SHARING_PROMPTS = [_PREFIX + random_prompt(length) for length in range(1, 21)]


def on_card(config: EngineConfig, *, eager: bool) -> Engine:
    return Engine(replace(config, device=DEVICE, enforce_eager=eager))


@dataclass(frozen=True)
class Expected:
    """A checkpoint, prompts, and what the engine answers on a CPU."""

    folder: Path
    run: Run
    prompts: Sequence[Any]
    answers: list[list[int]]

    def config(self, **settings: Any) -> EngineConfig:
        return engine_config(self.folder, max_num_seqs=MAX_NUM_SEQS, **settings)


def expected(folder: Path, run: Run, prompts: Sequence[Any]) -> Expected:
    answers = run(Engine(engine_config(folder, max_num_seqs=MAX_NUM_SEQS)), prompts)
    assert min(len(set(answer)) for answer in answers) >= 5, "answers that a fault could change"
    return Expected(folder, run, prompts, answers)


def run_text(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    return run_to_end(engine, prompts, greedy(NUM_TOKENS))


def run_pictures(engine: Engine, prompts: Sequence[ImagePrompt]) -> list[list[int]]:
    return run_with_images(engine, prompts, greedy(NUM_TOKENS))


@dataclass(frozen=True)
class VisionFamily:
    """Makes a checkpoint in a folder; `image_token_id` holds the place of its pictures."""

    image_token_id: int
    open: Callable[[Path], VisionReference]


def _qwen(family: str, folder: Path) -> VisionReference:
    return reference_qwen_vl.Reference(family, reference_qwen_vl.save_qwen_vl(family, folder))


def _llava(family: str, folder: Path) -> VisionReference:
    known = {**reference_llava.FAMILIES, **reference_llava.VARIANTS}[family]
    return reference_llava.Reference(known, reference_llava.save_llava(known, folder, seed=1))


def _idefics3(family: str, folder: Path) -> VisionReference:
    return reference_idefics3.Reference(family, reference_idefics3.save_idefics3(family, folder))


VISION_FAMILIES = {
    name: VisionFamily(image_token_id, partial(opener, name))
    for names, image_token_id, opener in (
        (reference_qwen_vl.FAMILIES, reference_qwen_vl.IMAGE_TOKEN, _qwen),
        ([*reference_llava.FAMILIES, *reference_llava.VARIANTS], reference_llava.IMAGE_TOKEN, _llava),
        (reference_idefics3.FAMILIES, reference_idefics3.IMAGE_TOKEN, _idefics3),
    )
    for name in names
}


@pytest.fixture(
    scope="module", params=[*FAMILIES, *(name for name in VISION_FAMILIES if name not in reference_llava.VARIANTS)]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    name, folder = request.param, tmp_path_factory.mktemp("checkpoint")
    if name in FAMILIES:
        yield expected(save_reference_model(name, folder), run_text, PROMPTS)
        return
    family = VISION_FAMILIES[name]
    reference = family.open(folder)
    with patch_store() as store:
        pieces = all_pieces(pictures(reference))
        prompts = [build_prompt(parts, family.image_token_id, store) for parts in pieces]
        yield expected(folder, run_pictures, prompts)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
class TestEqualsTheCpu:
    def test_alone(self, case: Expected, eager: bool) -> None:
        engine = on_card(case.config(prefix_caching=False), eager=eager)
        for prompt, answer in zip(case.prompts, case.answers, strict=True):
            assert case.run(engine, [prompt]) == [answer]

    def test_in_a_batch_and_from_the_prefix_cache(self, case: Expected, eager: bool) -> None:
        engine = on_card(case.config(), eager=eager)
        assert case.run(engine, case.prompts) == case.answers
        assert engine.scheduler.stats().prefix_cache_hits == 0
        assert case.run(engine, case.prompts) == case.answers
        assert engine.scheduler.stats().prefix_cache_hits >= 64

    def test_chunked_at_16(self, case: Expected, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = on_card(case.config(max_num_batched_tokens=16), eager=eager)
        run, largest = engine._runner.run, [0]

        def counting(batch: ScheduledBatch) -> PendingStep:
            largest.append(batch.num_tokens)
            return run(batch)

        monkeypatch.setattr(engine._runner, "run", counting)
        assert case.run(engine, case.prompts) == case.answers
        assert max(largest) == 16

    def test_after_preemption(self, case: Expected, eager: bool) -> None:
        """All prompts fit at once, but not with their answers."""
        lengths = [len(getattr(prompt, "token_ids", prompt)) for prompt in case.prompts]
        num_blocks = sum(length // 8 + 1 for length in lengths) + len(lengths)
        config = case.config(num_blocks=num_blocks, block_size=8, prefix_caching=False)
        engine = on_card(config, eager=eager)
        assert case.run(engine, case.prompts) == case.answers
        assert engine.scheduler.num_preemptions > 0

    def test_without_a_step_ahead(self, case: Expected, eager: bool) -> None:
        engine = on_card(replace(case.config(block_size=32), async_scheduling=False), eager=eager)
        assert case.run(engine, case.prompts) == case.answers


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3"])
def test_sequences_that_share_a_prefix(family: str, eager: bool, tmp_path: Path) -> None:
    case = expected(save_reference_model(family, tmp_path), run_text, SHARING_PROMPTS)
    engine = on_card(case.config(), eager=eager)
    assert run_text(engine, SHARING_PROMPTS[:1]) == case.answers[:1]
    assert run_text(engine, SHARING_PROMPTS) == case.answers
    assert engine.scheduler.stats().prefix_cache_hits >= len(SHARING_PROMPTS) * (PREFIX_LENGTH // 16 * 16)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_decoding_is_replayed_unless_eager(eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmserve.engine.cuda_graph import DecodeGraphs

    case = expected(save_reference_model("llama", tmp_path), run_text, PROMPTS)
    replay, num_replays = DecodeGraphs.replay, [0]

    def counting(graphs: DecodeGraphs, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        num_replays[0] += 1
        return replay(graphs, *arguments)

    monkeypatch.setattr(DecodeGraphs, "replay", counting)
    assert run_text(on_card(case.config(), eager=eager), PROMPTS) == case.answers
    assert num_replays[0] == (0 if eager else NUM_TOKENS - 1)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_pictures_cut_on_the_card(name: str, tmp_path: Path) -> None:
    """The engine scales the pictures itself; the CPU's engine gets patches that were cut before."""
    family = VISION_FAMILIES[name]
    reference, images = family.open(tmp_path), [random_picture(i, *size) for i, size in enumerate(PICTURE_SIZES)]
    checkpoint = open_checkpoint(str(tmp_path))
    processor = load_processor(checkpoint, checkpoint.tokenizer())
    assert processor is not None
    shared = [
        share_picture(image.numpy(), processor.plan(image.shape[1], image.shape[0], PixelLimits())) for image in images
    ]
    try:
        with patch_store() as store:
            pieces: list[list[list[int] | Picture]] = [
                [text(i, 9), reference.picture(image), text(50 + i, 5)] for i, image in enumerate(images)
            ]
            prompts = [build_prompt(parts, family.image_token_id, store) for parts in pieces]
            case = expected(tmp_path, run_pictures, prompts)
            uncut = [
                replace(
                    prompt,
                    images=tuple(replace(span, patches=ref) for span, ref in zip(prompt.images, refs, strict=True)),
                )
                for prompt, refs in zip(prompts, shared, strict=True)
            ]
            assert run_pictures(on_card(case.config(), eager=False), uncut) == case.answers
    finally:
        for ref in chain.from_iterable(refs[:1] for refs in shared):
            unlink(ref)


@pytest.mark.parametrize("size", [(1240, 1754), (161, 184)], ids=["page", "picture"])
def test_a_picture_through_the_facade(size: tuple[int, int], tmp_path: Path) -> None:
    folder, image = save_vision_model(tmp_path), random_picture(3, *size).numpy()
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Who?"}]},
    ]
    config = engine_config(folder, max_num_seqs=MAX_NUM_SEQS)
    answers = []
    for engine in (replace(config, vision=VisionConfig(pixels_on="worker")), replace(config, device=DEVICE)):
        with LLM(config=engine) as llm:
            ((completion,),) = llm.chat(messages, greedy(NUM_TOKENS))
            answers.append(completion.token_ids)
    assert answers[0] == answers[1]
