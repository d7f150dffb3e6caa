"""A request's pictures and documents: from URLs and base64 to what the model can take, within the server's limits.

What a file is decides its content, never its name or declared type. For a model with eyes pictures stay pictures, and
each page of a document becomes one; for a model without, documents become text between marks, and pictures are refused.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from mmserve.errors import DocumentError, MMServeError, RequestError
from mmserve.pipelines.chunking import PageText
from mmserve.pipelines.concurrency import together
from mmserve.pipelines.prompts import Fence
from mmserve.server.base64_data import decode_base64, is_data_url
from mmserve.server.schemas.content import Detail, MediaPart
from mmserve.server.state import ServerState
from mmserve.server.uploads import display_name
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import Document
from mmserve.vision.sniff import PDF_TYPE, TEXT_TYPE

_NO_EYES = (
    "the model served here reads text only. Send the picture or the document to /v1/summarize, which reads its pages,"
    " or send its text; a vision-language model would take it as it is."
)
# No tokenizer does better over a whole page.
_MOST_CHARACTERS_PER_TOKEN = 16
Parts = list[dict[str, Any]]


def limits_of(limits: PixelLimits, detail: Detail) -> PixelLimits:
    """`high` is all that the model takes within `limits`; `auto` is enough for a page to be read."""
    if detail == "low":
        return limits.low_detail()
    return limits.or_auto() if detail == "auto" else limits


@asynccontextmanager
async def received(
    state: ServerState, messages: Sequence[Mapping[str, Any]], limits: PixelLimits, owner: str
) -> AsyncIterator[list[dict[str, Any]]]:
    """Messages for the prompt builder, pictures within `limits`; their files are removed when the block is left.

    Raises `RequestError` and `DocumentError` that name the part at fault.
    """
    media = [part for message in messages for part in _media_parts(message)]
    if not media:
        yield [dict(message) for message in messages]
        return
    _check_count(state, len(media))
    with tempfile.TemporaryDirectory(prefix="mmserve-media-", dir=state.settings.upload_dir) as folder:
        receiver = _Receiver(state, limits, Path(folder), owner)
        documents = await receiver.open_all(media)
        if state.prompts.reads_images:
            _check_count(state, sum(_num_images(document) for document in documents))
        pairs = zip(media, documents, strict=True)
        parts = {part.where: await receiver.parts(part, document) for part, document in pairs}
        yield [_with_parts(message, parts) for message in messages]


class _Receiver:
    def __init__(self, state: ServerState, limits: PixelLimits, folder: Path, owner: str) -> None:
        self._state = state
        self._limits = limits
        self._folder = folder
        self._owner = owner
        self._room_bytes = state.settings.max_media_bytes

    async def open_all(self, media: Sequence[MediaPart]) -> list[Document]:
        """All at once, as many as are read and fetched at once; the first that fails ends the others."""
        return await together(self._open(index, part) for index, part in enumerate(media))

    async def parts(self, media: MediaPart, document: Document) -> Parts:
        """What stands in the message for one picture or document."""
        if document.media_type == TEXT_TYPE or not self._state.prompts.reads_images:
            return [{"type": "text", "text": await self._text(document)}]
        limits = limits_of(self._limits, media.detail)
        parts: Parts = []
        for page in range(1, document.num_pages + 1):
            parts += [{"type": "text", "text": f"[page {page}]"}] if document.num_pages > 1 else []
            parts.append({"type": "image", "source": ImageSource(document, page), "limits": limits})
        return parts

    async def _open(self, index: int, media: MediaPart) -> Document:
        try:
            if media.kind == "image" and not self._state.prompts.reads_images:
                raise _no_eyes(media)
            path = self._folder / str(index)
            content = await self._content(media)
            self._room_bytes -= len(content)
            if self._room_bytes < 0:
                raise _too_many_bytes(self._state.settings.max_media_bytes)
            await asyncio.to_thread(path.write_bytes, content)
            document = await self._state.reader.open(path, name=_name(media, index))
            self._check_kind(media, document)
            return document
        except MMServeError as error:
            raise type(error)(error.code, error.message, param=error.param or media.where) from None

    async def _content(self, media: MediaPart) -> bytes:
        if media.is_id:
            stored = await self._state.jobs.files.get(self._owner, media.source)
            if stored.num_bytes > self._room_bytes:
                raise _too_many_bytes(self._state.settings.max_media_bytes)
            return await asyncio.to_thread(stored.path.read_bytes)
        if not is_data_url(media.source) and re.match(r"[a-z][a-z0-9+.-]*:", media.source[:32], re.I):
            return await self._state.fetcher.fetch(media.source)
        return await asyncio.to_thread(decode_base64, media.source)

    def _check_kind(self, media: MediaPart, document: Document) -> None:
        if media.kind == "image" and document.media_type == TEXT_TYPE:
            raise DocumentError(
                "unsupported_type", f"{document.name} is text and no picture: send it in a part of type text or file"
            )
        if not self._state.prompts.reads_images and document.media_type not in (TEXT_TYPE, PDF_TYPE):
            raise _no_eyes(media)

    async def _text(self, document: Document) -> str:
        """The document's pages as text, between marks that they cannot contain."""
        pages: list[PageText] = []
        room = _MOST_CHARACTERS_PER_TOKEN * self._state.engine.max_model_len
        async with self._state.document_slots.of(self._owner), aclosing(self._state.reader.pages(document)) as reading:
            async for page in reading:
                if page.problem is not None:
                    raise page.problem
                pages += [PageText(page.number, page.text)] if page.text.strip() else []
                room -= len(page.text)
                if room < 0:
                    raise _too_long(document)
        if not pages:
            raise DocumentError("empty_document", f"{document.name}: no text was found on its pages")
        return Fence.around([page.text for page in pages], seed=document.sha256).wrap(pages)


def _media_parts(message: Mapping[str, Any]) -> list[MediaPart]:
    content = message["content"]
    return [] if isinstance(content, str) else [part for part in content if isinstance(part, MediaPart)]


def _with_parts(message: Mapping[str, Any], parts: Mapping[str, Parts]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    known = [ready for part in content for ready in (parts[part.where] if isinstance(part, MediaPart) else [part])]
    if all(part["type"] == "text" for part in known):
        return {**message, "content": "\n".join(part["text"] for part in known)}
    return {**message, "content": known}


def _num_images(document: Document) -> int:
    return 0 if document.media_type == TEXT_TYPE else document.num_pages


def _check_count(state: ServerState, num_images: int) -> None:
    most = state.settings.max_images_per_request
    if num_images > most:
        raise RequestError(
            "too_many_images",
            f"the request has {num_images} pictures and pages, and this server takes {most} at once: send them in"
            " several requests, or send a long document to /v1/summarize",
            param="messages",
        )


def _too_long(document: Document) -> RequestError:
    return RequestError(
        "context_length_exceeded",
        f"{document.name} has more text than the model's context holds: send it to /v1/summarize, or send fewer pages",
    )


def _no_eyes(media: MediaPart) -> RequestError:
    return RequestError("images_not_supported", f"{media.where} is a picture: {_NO_EYES}")


def _too_many_bytes(most: int) -> RequestError:
    return RequestError(
        "body_too_large",
        f"the request's pictures and documents have over {most:,} bytes, which is all that this server takes: send"
        " smaller ones, or fewer",
    )


def _name(media: MediaPart, index: int) -> str:
    return display_name(media.name, index + 1) if media.name else f"{media.kind} {index + 1}"
