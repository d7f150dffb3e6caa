"""`/v1/files`: documents that are sent once and asked about often, each seen by its owner alone."""

import asyncio
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from mmserve.errors import DocumentError, RequestError
from mmserve.jobs.files import while_kept
from mmserve.jobs.records import StoredFile
from mmserve.pipelines.batch import file_digest
from mmserve.server.schemas.common import STORAGE_STATUSES, error_responses
from mmserve.server.schemas.files import DeletedFile, FileForm, FileList, FileObject
from mmserve.server.schemas.operations import file_body
from mmserve.server.state import Owner, ServerState, State, require_running
from mmserve.server.uploads import Upload, receive_form
from mmserve.vision.page_types import Document

router = APIRouter(tags=["files"])

MAX_LISTED = 100
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED, description="How many at most, the newest first.")]
After = Annotated[str | None, Query(description="Only what is older than this one, by id.")]


@router.post(
    "/v1/files",
    response_model=FileObject,
    responses=error_responses(400, 408, 413, 415, 422, *STORAGE_STATUSES, 504, 507),
    openapi_extra={"requestBody": {"required": True, "content": file_body()}},
    dependencies=[Depends(require_running)],
)
async def create_file(request: Request, state: State, owner: Owner) -> dict[str, Any]:
    """Stores a document, for tasks and jobs to name by its id. What cannot be read is refused at once."""
    form = await receive_form(request, max_files=1, parent=state.settings.upload_dir)
    with ExitStack() as cleanup:
        cleanup.callback(form.discard)
        FileForm.parse(form.options)
        stored = await keep(state, owner, form.uploads[0])
    return stored.to_dict()


async def keep(state: ServerState, owner: str, upload: Upload, *, is_lenient: bool = False) -> StoredFile:
    """Stores an upload. With `is_lenient` also one that cannot be read: who works on it will say why.

    Raises `DocumentError`, `StorageError`.
    """
    try:
        document = await state.reader.open(upload.path, name=upload.name)
        media_type, num_pages, sha256 = document.media_type, document.num_pages, document.sha256
    except DocumentError:
        if not is_lenient:
            raise
        media_type, num_pages = "application/octet-stream", 0
        sha256 = await asyncio.to_thread(file_digest, upload.path)
    return await state.jobs.files.add(
        owner, upload.path, filename=upload.name, media_type=media_type, num_pages=num_pages, sha256=sha256
    )


@router.get("/v1/files", response_model=FileList, responses=error_responses(400, 404, *STORAGE_STATUSES))
async def list_files(state: State, owner: Owner, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """Your files, the newest first."""
    files, has_more = await state.jobs.files.list(owner, limit=limit, after=after)
    return {"object": "list", "data": [file.to_dict() for file in files], "has_more": has_more}


@router.get("/v1/files/{file_id}", response_model=FileObject, responses=error_responses(404, *STORAGE_STATUSES))
async def retrieve_file(file_id: str, state: State, owner: Owner) -> dict[str, Any]:
    """What is known of a file."""
    return (await state.jobs.files.get(owner, file_id)).to_dict()


@router.delete("/v1/files/{file_id}", response_model=DeletedFile, responses=error_responses(404, *STORAGE_STATUSES))
async def delete_file(file_id: str, state: State, owner: Owner) -> DeletedFile:
    """Removes the bytes, the drawn pages, and all results of these bytes that were cached for you."""
    await state.jobs.files.delete(owner, file_id)
    return DeletedFile(id=file_id)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={
        200: {"description": "The bytes.", "content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}},
        **error_responses(404, *STORAGE_STATUSES),
    },
)
async def download_file(file_id: str, state: State, owner: Owner) -> Response:
    """The file as it was sent, to be saved and not shown."""
    stored = await state.jobs.files.get(owner, file_id)
    headers = {"Content-Disposition": attachment(stored.filename), "X-Content-Type-Options": "nosniff"}
    with while_kept(stored.path):
        file = await asyncio.to_thread(stored.path.open, "rb")
    return _OpenFile(file, media_type=stored.media_type, headers=headers)


@router.get(
    "/v1/files/{file_id}/pages/{number}",
    response_class=Response,
    responses={
        200: {"description": "The page.", "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}},
        **error_responses(400, 404, 413, 415, 422, *STORAGE_STATUSES, 504, 507),
    },
)
async def draw_page(
    file_id: str,
    number: Annotated[int, Path(description="The page, from 1.", ge=1)],
    state: State,
    owner: Owner,
    width: Annotated[
        int, Query(ge=16, le=4096, description="Pixels across, or fewer where the page has no more.")
    ] = 1024,
) -> Response:
    """A page as a picture, drawn once and kept with the file. Text files have none."""
    stored = await state.jobs.files.get(owner, file_id)
    if number > stored.num_pages:
        raise RequestError("not_found", f"{stored.filename} has no page {number}: it has {stored.num_pages}.")
    document = Document(stored.path, stored.filename, stored.media_type, stored.sha256, stored.num_pages)
    with while_kept(stored.path):
        picture = await state.jobs.files.page_picture(
            stored, number, width, lambda: state.reader.draw(document, number, width)
        )
    headers = {"Cache-Control": "private, max-age=3600", "X-Content-Type-Options": "nosniff"}
    return Response(picture, media_type="image/png", headers=headers)


class _OpenFile(FileResponse):
    """A file that is sent to its end, even if it is deleted meanwhile."""

    def __init__(self, file: BinaryIO, **arguments: Any) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", **arguments)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def attachment(filename: str) -> str:
    """A Content-Disposition that has a name of any script saved and not shown (RFC 6266, RFC 8187)."""
    plain = "".join(character if character.isascii() and character not in '"\\%' else "_" for character in filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
