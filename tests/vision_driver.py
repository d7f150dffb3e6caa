"""Drives an `Engine` with images: pieces of text and pictures become prompts with spans over shared memory.

A family's tests make `Picture`s (the placeholder ids that one picture takes in the prompt, and its items' pixels),
build `ImagePrompt`s from them, and run these; `reference_greedy` is the other side of the comparison.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from engine_driver import run_requests

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.request import ImageSpan, PatchesRef, SamplingParams
from mmserve.vision.patches import PixelPatches, share, unlink

# width, height
PICTURE_SIZES = ((26, 28), (161, 184), (640, 480), (1240, 1754), (3000, 200), (1, 1))


@dataclass(frozen=True)
class Item:
    """What the encoder turns into one run of image tokens: a picture, or one of its tiles."""

    patches: PixelPatches
    num_tokens: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Picture:
    """`placeholder_ids` stand for the picture in the prompt; their image tokens belong to `items`, in order."""

    placeholder_ids: Sequence[int]
    items: Sequence[Item]


@dataclass(frozen=True)
class ImagePrompt:
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()

    def __add__(self, token_ids: Sequence[int]) -> "ImagePrompt":
        return ImagePrompt((*self.token_ids, *token_ids), self.images)


class PatchStore:
    """Shared-memory segments by content, as the front end keeps them: the same picture is stored once."""

    def __init__(self) -> None:
        self._refs: dict[bytes, PatchesRef] = {}

    def put(self, patches: PixelPatches) -> tuple[bytes, PatchesRef]:
        digest = content_hash(patches)
        if digest not in self._refs:
            self._refs[digest] = share(patches)
        return digest, self._refs[digest]

    def close(self) -> None:
        while self._refs:
            unlink(self._refs.popitem()[1])


@contextmanager
def patch_store() -> Iterator[PatchStore]:
    store = PatchStore()
    try:
        yield store
    finally:
        store.close()


def content_hash(patches: PixelPatches) -> bytes:
    pixels = patches.pixels.contiguous()
    digest = hashlib.blake2b(repr((tuple(pixels.shape), patches.layout)).encode(), digest_size=16)
    digest.update(pixels.numpy().tobytes())
    return digest.digest()


def build_prompt(pieces: Sequence[Sequence[int] | Picture], image_token_id: int, store: PatchStore) -> ImagePrompt:
    """Text (token ids) and pictures in the order of the prompt."""
    token_ids: list[int] = []
    images: list[ImageSpan] = []
    for piece in pieces:
        if isinstance(piece, Picture):
            images += _spans(piece, len(token_ids), image_token_id, store)
            token_ids += piece.placeholder_ids
        else:
            token_ids += piece
    return ImagePrompt(tuple(token_ids), tuple(images))


def _spans(picture: Picture, first: int, image_token_id: int, store: PatchStore) -> Iterator[ImageSpan]:
    ids, cursor = list(picture.placeholder_ids), 0
    for item in picture.items:
        start = ids.index(image_token_id, cursor)
        cursor = start + item.num_tokens
        assert ids[start:cursor] == [image_token_id] * item.num_tokens, "a run of image tokens is an item's tokens"
        digest, ref = store.put(item.patches)
        yield ImageSpan(first + start, item.num_tokens, digest, item.grid, ref)
    assert image_token_id not in ids[cursor:], "every image token belongs to an item"


def run_with_images(
    engine: Engine,
    prompts: Sequence[ImagePrompt],
    params: SamplingParams,
    *,
    after_step: Callable[[Engine], None] | None = None,
) -> list[list[int]]:
    """The tokens of every prompt; all are offered at once."""
    requests = [
        EngineRequest(str(i), list(prompt.token_ids), params, images=prompt.images) for i, prompt in enumerate(prompts)
    ]
    return run_requests(engine, requests, after_step=after_step)


@torch.inference_mode()
def reference_greedy(model: Any, prompt: Sequence[int], num_tokens: int, vision: Mapping[str, Any]) -> list[int]:
    """Greedy tokens of transformers' `model`; `vision` are its further arguments (`pixel_values`, ...).

    `mm_token_type_ids`, where given, covers the prompt alone. The prompt runs once, then one token at a time.
    """
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    output = model(input_ids=torch.tensor([list(prompt)]), use_cache=True, **vision)
    cache_name = "cache" if hasattr(output, "cache") else "past_key_values"
    tokens = [int(output.logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        cache = {cache_name: output[cache_name]}
        output = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **cache)
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


def random_text(seed: int, length: int, token_ids: range) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.choice(token_ids) for _ in range(length)]


def random_picture(seed: int, width: int, height: int, *, grey: bool = False) -> torch.Tensor:
    """uint8 `[height, width, 3]`: squares of random colours with some noise.

    Fine noise alone gives patches that an encoder can hardly tell apart, so that moving them goes unseen.
    """
    generator = torch.Generator().manual_seed(seed)
    num_channels, side = 1 if grey else 3, 24
    squares = torch.randint(0, 256, (-(-height // side), -(-width // side), num_channels), generator=generator)
    picture = squares.repeat_interleave(side, 0).repeat_interleave(side, 1)[:height, :width]
    noise = torch.randint(-20, 21, picture.shape, generator=generator)
    return (picture + noise).clamp(0, 255).to(torch.uint8).expand(height, width, 3).contiguous()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())
