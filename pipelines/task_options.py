"""A user's choices that every task over a document has in common."""

from dataclasses import dataclass
from typing import get_args

from mmserve.errors import RequestError
from mmserve.pipelines.page_views import Mode
from mmserve.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Validated at construction (`invalid_request` names the field).

    `pages` is a selection such as `1-4,7,10-`. `max_tokens` bounds the answer; the task decides if None. `mode` is what
    the model gets of the pages: their pictures, their text, or with `auto` the best that it takes. `max_pixels` and
    `min_pixels` hold for each picture of a page.
    """

    pages: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    mode: Mode = "auto"
    max_pixels: int | None = None
    min_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise RequestError("invalid_request", "mode must be auto, vision or text", param="mode")
        self.sampling(1 if self.max_tokens is None else self.max_tokens)

    @property
    def is_repeatable(self) -> bool:
        """Whether the same question has the same answer; else an earlier one would be no answer to who asks again."""
        return self.sampling(1).is_repeatable

    def sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=self.temperature, seed=self.seed)
