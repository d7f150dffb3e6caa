"""What it takes to do documents, which the server has; and how one is done, for a request or for a job."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmserve.jobs.files import while_kept
from mmserve.jobs.page_memory import PageSource
from mmserve.jobs.results import ResultCache, ResultKey
from mmserve.pipelines.document import DocumentReader
from mmserve.pipelines.engine_protocol import Prompts, TextEngine
from mmserve.pipelines.events import OnEvent, TextAdded
from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.tasks import TASKS, TaskName


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


@dataclass(frozen=True)
class OwnerTask:
    """What an owner wants done with documents. Results are the task's as JSON, with `cached`."""

    place: Workplace
    results: ResultCache
    owner: str
    task: TaskName
    options: TaskOptions
    no_cache: bool

    def key(self, sha256: str) -> ResultKey | None:
        """None for an answer that would be another one each time."""
        if not self.options.is_repeatable:
            return None
        return ResultKey.of(sha256, self.task, self.options, self.place.model)

    async def known(self, key: ResultKey | None, name: str, tell: OnEvent) -> dict[str, Any] | None:
        """The cached result, where one may be taken. Who follows its text gets it all at once."""
        if key is None or self.no_cache:
            return None
        result = await self.results.get(self.owner, key, name=name)
        if result is not None and isinstance(text := result.get("text"), str):
            tell(TextAdded(text))
        return result

    async def made(
        self,
        path: Path,
        name: str,
        tell: OnEvent,
        *,
        engine: TextEngine | None = None,
        reader: DocumentReader | None = None,
    ) -> dict[str, Any]:
        """By `engine` and `reader`, or those of the place. Raises and is cancelled as the task."""
        place = self.place
        with while_kept(path), place.watched(self.task, tell) as watched:
            result = await TASKS[self.task].run(
                path,
                name=name,
                engine=engine or place.engine_for(self.owner),
                prompts=place.prompts_for(self.owner),
                reader=reader or place.reader,
                options=self.options,
                on_event=watched,
            )
        return {**result.to_dict(), "cached": False}
