"""A task over one document for one owner: from the result cache where it may, else by the engine."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.errors import StorageError
from mmserve.jobs.files import while_kept
from mmserve.jobs.results import ResultKey, tell_text
from mmserve.pipelines.batch import file_digest
from mmserve.pipelines.events import OnEvent
from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.tasks import TASKS, TaskName
from mmserve.server.state import ServerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskRun:
    """What an owner wants done with each document of a request."""

    state: ServerState
    owner: str
    task: TaskName
    options: TaskOptions
    no_cache: bool = False

    async def result(
        self, path: Path, name: str, on_event: OnEvent | None = None, *, is_stored: bool = False
    ) -> dict[str, Any]:
        """The task's result with `cached`. Raises as the task does; cancelling it ends the engine's work on it."""
        with while_kept(path):
            return await self._result(path, name, on_event, is_stored=is_stored)

    async def _result(self, path: Path, name: str, on_event: OnEvent | None, *, is_stored: bool) -> dict[str, Any]:
        key = await self._key(path)
        known = None if key is None or self.no_cache else await self._known(key, name)
        if known is not None:
            if on_event is not None:
                tell_text(known, on_event)
            return known
        result = await self._made(path, name, on_event)
        if key is not None:
            await self._remember(key, result, is_stored=is_stored)
        return {**result, "cached": False}

    async def _made(self, path: Path, name: str, on_event: OnEvent | None) -> dict[str, Any]:
        async with self.state.document_slots.of(self.owner):
            with self.state.watched(self.task, on_event) as tell:
                made = await TASKS[self.task].run(
                    path,
                    name=name,
                    engine=self.state.engine_for(self.owner),
                    prompts=self.state.prompts_for(self.owner),
                    reader=self.state.reader,
                    options=self.options,
                    on_event=tell,
                )
        return made.to_dict()

    async def _known(self, key: ResultKey, name: str) -> dict[str, Any] | None:
        try:
            return await self.state.jobs.results.get(self.owner, key, name=name)
        except StorageError as error:
            logger.warning("the result cache cannot be read: %s", error)
            return None

    async def _remember(self, key: ResultKey, result: dict[str, Any], *, is_stored: bool) -> None:
        try:
            await self.state.jobs.results.put(self.owner, key, result, is_of_file=is_stored)
        except StorageError as error:
            logger.warning("a result cannot be cached: %s", error)

    async def _key(self, path: Path) -> ResultKey | None:
        """None for an answer that would be another one each time."""
        if not self.options.is_repeatable:
            return None
        digest = await asyncio.to_thread(file_digest, path)
        return ResultKey.of(digest, self.task, self.options, self.state.model)
