"""Bodies in JSON: what is taken for one, and what is refused before anything is made of it."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from mmserve.errors import RequestError
from mmserve.server.uploads import declared_media_type, is_json


async def read_json_object(request: Request) -> Mapping[str, Any]:
    """Raises `RequestError` for a body that is none."""
    if not is_json(request):
        raise RequestError(
            "unsupported_type",
            "Send documents as multipart/form-data, each in a field named file, or as application/json.",
            param="file",
        )
    await require_json(request)
    body = await _json_of(request)
    if not isinstance(body, dict):
        raise RequestError("invalid_request", "The body must be a JSON object.")
    return body


async def require_json(request: Request) -> None:
    """A page of another site can send `text/plain` without asking the browser, but not `application/json`."""
    if not is_json(request):
        media_type = declared_media_type(request)
        sent = repr(media_type) if media_type else "no Content-Type"
        raise RequestError("unsupported_type", f"Send the body as application/json; this request has {sent}.")
    body = await request.body()
    _require_utf8(body)
    if b"\\ud" in body.lower():
        _refuse_half_characters(await _json_of(request))


async def _json_of(request: Request) -> Any:
    """The body. Raises `RequestError` for one that is no JSON, or has more levels than can be read."""
    try:
        return await request.json()
    except ValueError as error:
        raise RequestError("invalid_request", f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError("invalid_request", "The body is nested too deeply: send fewer levels.") from None


def _require_utf8(body: bytes) -> None:
    """Python's parser would also take UTF-16 and UTF-32, which have NULs, and halves of surrogate pairs in any."""
    try:
        body.decode()
    except UnicodeDecodeError:
        is_utf8 = False
    else:
        is_utf8 = b"\0" not in body
    if not is_utf8:
        raise RequestError("invalid_request", "The body is not JSON in UTF-8: encode it so.")


def _refuse_half_characters(body: Any) -> None:
    """JSON can spell half of a surrogate pair, which is no text that a tokenizer could take."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise RequestError(
            "invalid_request", "The body has a surrogate (\\ud800 to \\udfff) without its pair, or too many levels."
        ) from None
