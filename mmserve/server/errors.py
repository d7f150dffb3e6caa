"""Every failure as OpenAI's envelope, `{"error": {message, type, param, code}}`, with the status of its code."""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.errors import ErrorCode, MMServeError, RequestError
from mmserve.server.lifetime import ClientGone

logger = logging.getLogger(__name__)

# Nobody reads this answer; the number is nginx's, for the access log.
CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_SECONDS = {"queue_full": 1, "engine_not_ready": 5, "shutting_down": 10, "engine_dead": 30}
INTERNAL_ERROR = MMServeError(
    "internal_error", "The server met a fault of its own while it answered; its log has the details. Try again."
)


class BodyTooLarge(HTTPException):
    """Raised while a body is read; an `HTTPException`, so that no framework layer on the way replaces it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"The request's body is over {limit_bytes} bytes, which is all that this server takes.")


class BodyStalled(HTTPException):
    """Raised where a sender has stopped in the middle of its body."""

    def __init__(self, seconds: float) -> None:
        super().__init__(408, f"The request's body stopped arriving for {seconds:g} seconds. Send it again.")


class BodyTooSlow(HTTPException):
    """Raised where a body has trickled in for longer than it may take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(408, f"The request's body took over {seconds:g} seconds to arrive. Send less at once.")


def envelope(error: MMServeError) -> dict[str, Any]:
    return {"error": error.to_dict()}


def error_response(error: MMServeError) -> JSONResponse:
    seconds = RETRY_AFTER_SECONDS.get(error.code)
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return JSONResponse(envelope(error), status_code=error.http_status, headers=headers)


def as_mmserve_error(error: Exception) -> MMServeError:
    """What a client may be told about any exception; an unexpected one is logged and says nothing of its own."""
    if isinstance(error, MMServeError):
        return error
    if isinstance(error, HTTPException):
        return _from_http_exception(error)
    logger.error("unexpected error", exc_info=error)
    return INTERNAL_ERROR


def from_validation(errors: Sequence[Any]) -> RequestError:
    """The first of pydantic's complaints as a sentence that names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        position, reason = first["loc"][-1], first.get("ctx", {}).get("error", "malformed")
        return RequestError("invalid_request", f"The body is not valid JSON: {reason} at character {position}.")
    location = first["loc"]
    if not location:
        return RequestError("invalid_request", "The body must be a JSON object.")
    param = _param(location)
    if first["type"] == "extra_forbidden":
        param = ".".join(str(part) for part in location)
        return RequestError("invalid_request", f"Unrecognized request argument supplied: {param}", param=param)
    return RequestError("invalid_request", f"{param}: {first['msg']}.", param=param)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(MMServeError, _handle)
    app.add_exception_handler(HTTPException, _handle)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(ClientGone, _handle_client_gone)
    app.add_exception_handler(ClientDisconnect, _handle_client_gone)
    app.add_middleware(UnexpectedErrors)


class UnexpectedErrors:
    """Outermost: what nothing else handled becomes one log entry and a 500 that tells nothing about the inside."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            if has_started:
                raise
            logger.exception("unexpected error in %s %r", scope["method"], scope["path"])
            await error_response(INTERNAL_ERROR)(scope, receive, send)


async def _handle(_request: Request, error: Exception) -> JSONResponse:
    response = error_response(as_mmserve_error(error))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _handle_client_gone(request: Request, _error: Exception) -> Response:
    logger.info("client left during %r", request.url.path)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _handle_validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    places = ("path", "query", "header", "body")
    errors = [{**one, "loc": one["loc"][one["loc"][0] in places :]} for one in error.errors()]
    return error_response(from_validation(errors))


def _from_http_exception(error: HTTPException) -> MMServeError:
    codes: dict[int, ErrorCode] = {
        404: "not_found",
        405: "method_not_allowed",
        408: "body_stalled",
        413: "body_too_large",
    }
    sentences = {
        404: "There is nothing at this address; /docs lists what this server offers.",
        405: "This address does not take this method; /docs lists what it takes.",
    }
    code = codes.get(error.status_code, "invalid_request")
    return RequestError(code, sentences.get(error.status_code, str(error.detail)))


def _param(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0]`: deeper parts name pydantic's union branches, not fields."""
    param = str(location[0])
    return f"{param}[{location[1]}]" if len(location) > 1 and isinstance(location[1], int) else param
