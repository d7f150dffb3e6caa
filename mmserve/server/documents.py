"""The documents of a request, in whichever form they were sent: uploads, base64, stored files, URLs."""

import asyncio
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from fastapi import Request

from mmserve.server.base64_data import decode_base64
from mmserve.server.json_body import read_json_object
from mmserve.server.schemas.tasks import DocumentsBody, DocumentSource, TaskFields, TaskSchema
from mmserve.server.state import ServerState
from mmserve.server.uploads import display_name, is_multipart, new_folder, receive_form


@dataclass(frozen=True)
class SentDocument:
    """`path` is that of an upload; what lies elsewhere is brought here when it is its turn, from `source`."""

    name: str
    path: Path | None = None
    source: DocumentSource | None = None

    @property
    def is_stored(self) -> bool:
        return self.source is not None and self.source.file_id is not None


@dataclass(frozen=True)
class SentTask:
    """What was asked, and the documents. `discard` removes what was stored for it; whoever has it must call it."""

    fields: TaskFields
    documents: tuple[SentDocument, ...]
    folder: Path

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


async def receive_task(request: Request, schema: TaskSchema, state: ServerState) -> SentTask:
    """Reads a body, multipart or JSON. Raises `RequestError`."""
    settings = state.settings
    if is_multipart(request):
        form = await receive_form(request, max_files=settings.max_files, parent=settings.upload_dir)
        try:
            fields = schema.form.parse_form(form.options)
        except BaseException:
            form.discard()
            raise
        return SentTask(fields, tuple(SentDocument(one.name, one.path) for one in form.uploads), form.folder)
    body = schema.body.parse(await read_json_object(request))
    assert isinstance(body, DocumentsBody)
    documents = [_named(source, place) for place, source in enumerate(body.sources(settings.max_files), start=1)]
    return SentTask(body, tuple(documents), new_folder(settings.upload_dir))


async def brought(document: SentDocument, folder: Path, state: ServerState, owner: str) -> tuple[str, Path]:
    """The document's name and its file on this machine.

    Raises `RequestError`: `not_found` for a stored file, `url_not_allowed`, `url_unreachable`, `body_too_large`.
    """
    if document.path is not None:
        return document.name, document.path
    source = document.source
    assert source is not None
    if source.file_id is not None:
        stored = await state.jobs.files.get(owner, source.file_id)
        return (document.name if source.filename else stored.filename), stored.path
    if source.url is not None:
        content = await state.fetcher.fetch(source.url)
    else:
        assert source.file_data is not None
        content = await asyncio.to_thread(decode_base64, source.file_data)
    path = folder / secrets.token_hex(16)
    await asyncio.to_thread(path.write_bytes, content)
    return document.name, path


def _named(source: DocumentSource, position: int) -> SentDocument:
    in_url = unquote((source.url or "").partition("?")[0].partition("#")[0])
    return SentDocument(display_name(source.filename or in_url or source.file_id, position), source=source)
