"""Uploaded files on disk: in a folder of their own that is always removed, under names of our choice."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile

from mmserve.errors import RequestError

FILE_FIELDS = ("file", "files", "file[]", "files[]")
MAX_FIELDS = 64
MAX_NAME_CHARACTERS = 255


@dataclass(frozen=True)
class Upload:
    """A file at a path of ours; `name` is the sender's, and only ever shown."""

    name: str
    path: Path


@dataclass(frozen=True)
class UploadForm:
    """The files and options of one request. `discard` removes the files; whoever has the form must call it."""

    folder: Path
    uploads: tuple[Upload, ...]
    options: dict[str, str]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


async def receive_form(request: Request, *, max_files: int, parent: Path | None) -> UploadForm:
    """Reads a multipart body and stores its files in a new folder that only this user can read.

    Raises `RequestError` where the body is not multipart or holds no file. The byte cap is `BodyLimit`'s.
    """
    _require_multipart(request)
    async with request.form(max_files=max_files, max_fields=MAX_FIELDS) as form:
        options = _options(form)
        files = _files(form)
        folder = new_folder(parent)
        try:
            return UploadForm(folder, await asyncio.to_thread(_store, files, folder), options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def new_folder(parent: Path | None) -> Path:
    """For what a request has sent; only this user can read it."""
    return Path(tempfile.mkdtemp(prefix="mmserve-upload-", dir=parent))


def display_name(sent: str | None, position: int) -> str:
    """The last part of what the sender calls its file, printable and of bounded length."""
    last = PurePosixPath((sent or "").replace("\\", "/")).name
    printable = "".join(character for character in last if character.isprintable())
    return printable[:MAX_NAME_CHARACTERS] if printable.strip(". ") else f"file-{position}"


def declared_media_type(request: Request) -> str:
    """The body's media type as it was declared, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_multipart(request: Request) -> bool:
    return declared_media_type(request) == "multipart/form-data"


def is_json(request: Request) -> bool:
    media_type = declared_media_type(request)
    return media_type == "application/json" or media_type.endswith("+json")


def _require_multipart(request: Request) -> None:
    if not is_multipart(request):
        raise RequestError(
            "unsupported_type", "Send documents as multipart/form-data, each in a field named file.", param="file"
        )
    # The parser would take any of Python's codecs, some of which make text that is none.
    _, parameters = parse_options_header(request.headers["content-type"])
    if parameters.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        raise RequestError("unsupported_type", "Send the form in UTF-8, and leave charset out.")


def _files(form: FormData) -> list[UploadFile]:
    files = []
    for field, value in form.multi_items():
        if field not in FILE_FIELDS:
            continue
        if not isinstance(value, UploadFile):
            raise RequestError(
                "invalid_request", f"The field {field} must be a file with a filename, not a text.", param="file"
            )
        files.append(value)
    if not files:
        raise RequestError("invalid_request", "Send at least one document in a field named file.", param="file")
    return files


def _options(form: FormData) -> dict[str, str]:
    options: dict[str, str] = {}
    for field, value in form.multi_items():
        if field in FILE_FIELDS:
            continue
        if not isinstance(value, str):
            raise RequestError("invalid_request", f"Files go into the field file, not {field}.", param=field)
        if field in options:
            raise RequestError("invalid_request", f"{field} is given twice.", param=field)
        options[field] = value
    return options


def _store(files: Sequence[UploadFile], folder: Path) -> tuple[Upload, ...]:
    uploads = []
    for position, file in enumerate(files, start=1):
        path = folder / secrets.token_hex(16)
        with path.open("xb") as target:
            _copy(file.file, target)
        uploads.append(Upload(display_name(file.filename, position), path))
    return tuple(uploads)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, length=1024 * 1024)
