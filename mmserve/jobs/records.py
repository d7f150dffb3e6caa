"""What is kept of files and jobs, as it is handed out. Times are Unix seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmserve.pipelines.tasks import TaskName

JobStatus = Literal["queued", "running", "done", "failed", "cancelled"]
EventName = Literal["progress", "delta", "result", "error", "done"]
UNFINISHED: tuple[JobStatus, ...] = ("queued", "running")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that its owner has sent. Its bytes lie at `path`, `folder` is for what is derived from them."""

    id: str
    owner: str
    filename: str
    media_type: str
    num_pages: int
    sha256: str
    num_bytes: int
    created_at: float
    expires_at: float
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "content"

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "filename": self.filename,
            "media_type": self.media_type,
            "num_pages": self.num_pages,
            "sha256": self.sha256,
        }


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One file of a job. `num_pages` are to be read, None until it is opened; `error` is an error object."""

    file_id: str
    filename: str
    sha256: str
    status: JobStatus
    num_pages: int | None = None
    num_pages_read: int = 0
    error: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "file_id": self.file_id,
            "filename": self.filename,
            "status": self.status,
            "num_pages": self.num_pages,
            "num_pages_read": self.num_pages_read,
            "error": self.error,
        }


@dataclass(frozen=True, kw_only=True)
class Job:
    """A task over some files of one owner.

    `results` are one a file in their order, each a result or `{"error": ...}`; None before the job has ended, and in
    lists of jobs. `no_cache` jobs are not answered from earlier results.
    """

    id: str
    owner: str
    task: TaskName
    options: dict[str, Any]
    status: JobStatus
    created_at: float
    expires_at: float
    files: Sequence[JobFile]
    started_at: float | None = None
    finished_at: float | None = None
    no_cache: bool = False
    error: dict[str, Any] | None = None
    webhook_url: str | None = None
    results: Sequence[dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def has_ended(self) -> bool:
        return self.status not in UNFINISHED

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "job",
            "task": self.task,
            "status": self.status,
            "created_at": int(self.created_at),
            "started_at": _seconds(self.started_at),
            "finished_at": _seconds(self.finished_at),
            "expires_at": int(self.expires_at),
            "options": self.options,
            "files": [file.to_dict() for file in self.files],
            "results": None if self.results is None else list(self.results),
            "error": self.error,
        }


@dataclass(frozen=True)
class JobEvent:
    """`number` ascends within a job, from 1. `data` has the file's `index` and `name`, or the job's `status`."""

    number: int
    event: EventName
    data: dict[str, Any]


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
