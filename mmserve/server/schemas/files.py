"""`/v1/files`: what is said of a stored file."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.server.schemas.common import RequestModel

_EXAMPLE: dict[str, Any] = {
    "id": "file-3f1c9a4be2d84b0c9a7e1f7d52c6a810",
    "object": "file",
    "bytes": 48213,
    "created_at": 1767225600,
    "expires_at": 1767830400,
    "filename": "invoice.pdf",
    "media_type": "application/pdf",
    "num_pages": 2,
    "sha256": "8d5e957f297893487bd98fa830fa6413e9b0f2c6e1a1b1a0a3b2b8a4c8a7a1f0",
}


class FileForm(RequestModel):
    """A form's field beside the file."""

    purpose: str | None = Field(None, description="Accepted and ignored.")


class FileObject(BaseModel):
    """A file that was sent. Times are Unix seconds."""

    model_config = ConfigDict(json_schema_extra={"example": _EXAMPLE})

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int = Field(description="When it is removed, with all that was made of it.")
    filename: str
    media_type: str = Field(description="What the content is, whatever its name says.")
    num_pages: int
    sha256: str


class FileList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"object": "list", "data": [_EXAMPLE], "has_more": False}})

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool = Field(description="Whether there are older ones: ask again with `after`, the last id here.")


class DeletedFile(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"id": _EXAMPLE["id"], "object": "file", "deleted": True}})

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
