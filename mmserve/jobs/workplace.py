"""What it takes to do documents; the server has it."""

from typing import Protocol

from mmserve.jobs.page_memory import PageSource
from mmserve.pipelines.engine_protocol import Prompts, TextEngine


class Workplace(Protocol):
    """Engine and prompts are an owner's own. No job is begun while it is not ready.

    `model` is all about the server that may change an answer: weights, precision, how pages are read.
    """

    @property
    def is_ready(self) -> bool: ...

    @property
    def reader(self) -> PageSource: ...

    @property
    def model(self) -> str: ...

    def engine_for(self, owner: str) -> TextEngine: ...

    def prompts_for(self, owner: str) -> Prompts: ...
