"""What it takes to do documents; the server has it."""

from contextlib import AbstractContextManager
from typing import Protocol

from mmserve.jobs.page_memory import PageSource
from mmserve.pipelines.engine_protocol import Prompts, TextEngine
from mmserve.pipelines.events import OnEvent
from mmserve.pipelines.tasks import TaskName


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

    def watched(self, task: TaskName, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        """To be entered around a task, which tells what it gets: whoever measures hears of it on the way."""
