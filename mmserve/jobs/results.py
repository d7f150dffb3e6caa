"""Results by what decides them: the bytes, the task, its options and the model. Each owner has its own."""

from dataclasses import dataclass
from typing import Any, Self

from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.tasks import TaskName


@dataclass(frozen=True)
class ResultKey:
    sha256: str
    digest: str

    @classmethod
    def of(cls, sha256: str, task: TaskName, options: TaskOptions, model: str) -> Self:
        """`model` is all about the server that may change an answer: weights, precision, how pages are read."""
        raise NotImplementedError


class ResultCache:
    async def get(self, owner: str, key: ResultKey, *, name: str) -> dict[str, Any] | None:
        """A result, as if the document were called `name`, with `cached` true."""
        raise NotImplementedError

    async def put(self, owner: str, key: ResultKey, result: dict[str, Any]) -> None:
        """Keeps a result, unless a page of it could not be read: that may go better the next time."""
        raise NotImplementedError
