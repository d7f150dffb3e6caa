"""`/v1/jobs`: what starts a job, and what is said of one."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.jobs.records import JobStatus
from mmserve.pipelines.tasks import TaskName
from mmserve.server.schemas.common import ErrorBody, RequestModel

_OPTIONS: dict[str, Any] = {"length": "short"}

_EXAMPLE: dict[str, Any] = {
    "id": "job-5b0f6c1d9e7a4f1c8d2b3a4c5d6e7f80",
    "object": "job",
    "task": "summarize",
    "status": "running",
    "created_at": 1767225600,
    "started_at": 1767225601,
    "finished_at": None,
    "expires_at": 1767830400,
    "options": _OPTIONS,
    "files": [
        {
            "file_id": "file-3f1c9a4be2d84b0c9a7e1f7d52c6a810",
            "filename": "invoice.pdf",
            "status": "running",
            "num_pages": 2,
            "num_pages_read": 1,
            "error": None,
        }
    ],
    "results": None,
    "error": None,
}


class JobRequest(RequestModel):
    """A task over files that are stored already."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "task": "summarize",
                "file_ids": ["file-3f1c9a4be2d84b0c9a7e1f7d52c6a810"],
                "options": _OPTIONS,
                "webhook_url": None,
            }
        }
    )

    task: TaskName
    file_ids: list[str] = Field(min_length=1, description="Files that were stored by POST /v1/files.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The fields of the task's own route, such as length or question."
    )
    webhook_url: str | None = Field(
        None, description="Where to send word when the job has ended; only hosts that the operator allows."
    )


class JobForm(RequestModel):
    """A form's fields beside the files; those of the task's own route come on top."""

    task: TaskName
    webhook_url: str | None = None


class JobFileObject(BaseModel):
    file_id: str
    filename: str
    status: JobStatus
    num_pages: int | None = Field(description="How many are to be read; null until the file was opened.")
    num_pages_read: int
    error: ErrorBody | None


class JobObject(BaseModel):
    """A job. Times are Unix seconds."""

    model_config = ConfigDict(json_schema_extra={"example": _EXAMPLE})

    id: str
    object: Literal["job"]
    task: TaskName
    status: JobStatus
    created_at: int
    started_at: int | None
    finished_at: int | None
    expires_at: int = Field(description="When the job is removed with its results.")
    options: dict[str, Any]
    files: list[JobFileObject]
    results: list[dict[str, Any]] | None = Field(
        description="One a file, in their order: a result as the task's own route gives it, or an `error`. Null until"
        " the job has ended, and in lists."
    )
    error: ErrorBody | None


class JobList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"object": "list", "data": [_EXAMPLE], "has_more": False}})

    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool = Field(description="Whether there are older ones: ask again with `after`, the last id here.")


class DeletedJob(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"id": _EXAMPLE["id"], "object": "job", "deleted": True}})

    id: str
    object: Literal["job"] = "job"
    deleted: Literal[True] = True
