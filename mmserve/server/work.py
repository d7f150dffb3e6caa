"""A task over documents of a request: in turn, and whether or not the result cache can be had."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.errors import StorageError
from mmserve.jobs.files import while_kept
from mmserve.jobs.results import ResultKey
from mmserve.jobs.workplace import OwnerTask
from mmserve.pipelines.batch import file_digest
from mmserve.pipelines.events import OnEvent, tell_nobody
from mmserve.server.state import ServerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskRun(OwnerTask):
    """What an owner wants done with each document of a request."""

    place: ServerState

    async def result(
        self, path: Path, name: str, tell: OnEvent = tell_nobody, *, is_stored: bool = False
    ) -> dict[str, Any]:
        """The task's result with `cached`. Raises as the task does; cancelling it ends the engine's work on it."""
        key, known = await self._key_of(path), None
        with _even_if("the result cache cannot be read"):
            known = await self.known(key, name, tell)
        if known is not None:
            return known
        async with self.place.document_slots.of(self.owner):
            made = await self.made(path, name, tell)
        if key is not None:
            with _even_if("a result cannot be cached"):
                await self.results.put(self.owner, key, made, is_of_file=is_stored)
        return made

    async def _key_of(self, path: Path) -> ResultKey | None:
        if not self.options.is_repeatable:
            return None
        with while_kept(path):
            return self.key(await asyncio.to_thread(file_digest, path))


@contextmanager
def _even_if(problem: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("%s: %s", problem, error)
