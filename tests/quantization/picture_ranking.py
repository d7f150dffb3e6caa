"""How alike pictures are to a model: those that differ step by step, and the model's last hidden state for each.

Random weights as other tests draw them give nearly one hidden state for all pictures, so that their order is chance.
Here the decoder is wide, little but the pictures is in what it adds up, and neither encoder nor decoder is chaotic.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from engine_driver import engine_config, greedy
from random_weights import Gains, randomize
from reference_llava import FAMILIES as LLAVA
from reference_llava import Reference as LlavaReference
from reference_llava import save_llava
from reference_qwen_vl import IMAGE_TOKEN, save_qwen_vl
from reference_qwen_vl import Reference as QwenReference
from vision_driver import Picture, build_prompt, patch_store, random_text, run_with_images

from mmserve.engine.engine import Engine

NUM_PICTURES = 5
# Between neighbours in the order, for the model in full precision, and for a quantized one.
MIN_FALL, MIN_FALL_QUANTIZED = 0.06, 0.03
_SIDE, _SQUARE = 112, 28
_COLOURS = ((230, 60, 30), (20, 90, 220))
_GAINS = Gains(scores=1.0, vision_scores=0.3, embedding=0.1)
_SEED = 4
_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
)
_VISION: Mapping[str, Any] = MappingProxyType({"hidden_size": 64, "intermediate_size": 96})
FAMILIES = ("qwen2_5_vl", "llava")
Reference = QwenReference | LlavaReference


def save_seeing_model(family: str, folder: Path) -> Reference:
    """A small random checkpoint in whose last hidden state pictures are told apart."""
    reference: Reference
    if family == "llava":
        shape = replace(LLAVA[family], text={**LLAVA[family].text, **_TEXT}, vision={**LLAVA[family].vision, **_VISION})
        reference = LlavaReference(shape, save_llava(shape, folder))
    else:
        vision = {**_VISION, "out_hidden_size": _TEXT["hidden_size"]}
        reference = QwenReference(family, save_qwen_vl(family, folder, text=_TEXT, vision=vision))
    randomize(reference.model, _GAINS, _SEED)
    reference.model.save_pretrained(str(folder))
    return reference


def graded_pictures() -> list[torch.Tensor]:
    """uint8 `[height, width, 3]`: red squares, blue ones, and between them pictures that are blue to 1, 2 and 3/4."""
    generator, count = torch.Generator().manual_seed(0), _SIDE // _SQUARE
    red, blue = (
        (torch.tensor(colour) + torch.randint(-60, 61, (count, count, 3), generator=generator))
        .clamp(0, 255)
        .repeat_interleave(_SQUARE, 0)
        .repeat_interleave(_SQUARE, 1)
        .to(torch.uint8)
        for colour in _COLOURS
    )
    heights = [_SIDE * i // (NUM_PICTURES - 1) for i in range(NUM_PICTURES)]
    return [torch.cat((blue[:height], red[height:])) for height in heights]


class SeenPictures:
    """What the model of `folder` makes of `graded_pictures`: `encoded`, and the last `hidden` state of a prompt each.

    `spoil`, if given, gets the engine before it runs.
    """

    def __init__(
        self, folder: Path, reference: Reference, *, spoil: Callable[[Engine], None] | None = None, **fields: Any
    ) -> None:
        engine = Engine(replace(engine_config(folder), **fields))
        model: Any = engine._runner._model
        if spoil is not None:
            spoil(engine)
        pictures = [reference.picture(picture) for picture in graded_pictures()]
        with torch.inference_mode():
            patches = [item.patches for picture in pictures for item in picture.items]
            self.encoded: list[torch.Tensor] = model.encode_images(patches)
        self.hidden = _last_hidden_states(engine, pictures)

    @property
    def similarities(self) -> torch.Tensor:
        """Of each picture's hidden state to each of the others `[pictures, pictures]`."""
        return torch.nn.functional.cosine_similarity(self.hidden[:, None], self.hidden[None], dim=-1)

    @property
    def smallest_fall(self) -> float:
        """By how much similarity falls, at least, with each step away from any picture, to either side.

        Where it is positive, pictures are ranked as they were made; one answer for all of them makes it 0.
        """
        rows = self.similarities
        right, left = rows[:, :-1] - rows[:, 1:], rows[:, 1:] - rows[:, :-1]
        steps = torch.arange(len(rows) - 1)
        goes_right = steps[None] >= torch.arange(len(rows))[:, None]
        return float(torch.where(goes_right, right, left).min())


def _last_hidden_states(engine: Engine, pictures: list[Picture]) -> torch.Tensor:
    """float32 `[pictures, hidden]`, as they go into the output layer."""
    model: Any = engine._runner._model
    seen: list[torch.Tensor] = []
    logits: Callable[[torch.Tensor], torch.Tensor] = model.logits

    def logits_seen(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return logits(hidden)

    model.logits = logits_seen
    with patch_store() as store:
        for picture in pictures:
            prompt = build_prompt([picture, random_text(0, 4, range(3, 400))], IMAGE_TOKEN, store)
            run_with_images(engine, [prompt], greedy(1))
    return torch.stack([hidden[-1] for hidden in seen]).float()
