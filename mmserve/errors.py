"""Every error that a user can meet: a stable code, the HTTP status it maps to, and a sentence that says what to do."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self

ErrorCode = Literal[
    "invalid_request",
    "invalid_schema",
    "context_length_exceeded",
    "model_not_found",
    "body_stalled",
    "body_too_large",
    "page_too_large",
    "too_many_pages",
    "too_many_images",
    "images_not_supported",
    "url_not_allowed",
    "url_unreachable",
    "unsupported_type",
    "corrupt_document",
    "empty_document",
    "password_required",
    "output_truncated",
    "not_found",
    "method_not_allowed",
    "queue_full",
    "internal_error",
    "engine_dead",
    "engine_not_ready",
    "shutting_down",
    "missing_dependency",
    "model_unavailable",
    "insufficient_memory",
    "timeout",
]

HTTP_STATUS: Mapping[ErrorCode, int] = MappingProxyType(
    {
        "invalid_request": 400,
        "invalid_schema": 400,
        "context_length_exceeded": 400,
        "images_not_supported": 400,
        "url_not_allowed": 400,
        "url_unreachable": 400,
        "model_not_found": 404,
        "not_found": 404,
        "method_not_allowed": 405,
        "body_stalled": 408,
        "body_too_large": 413,
        "page_too_large": 413,
        "too_many_pages": 413,
        "too_many_images": 413,
        "unsupported_type": 415,
        "corrupt_document": 422,
        "empty_document": 422,
        "password_required": 422,
        "output_truncated": 422,
        "queue_full": 429,
        "internal_error": 500,
        "engine_dead": 503,
        "engine_not_ready": 503,
        "shutting_down": 503,
        "missing_dependency": 503,
        "model_unavailable": 503,
        "insufficient_memory": 503,
        "timeout": 504,
    }
)


class MMServeError(Exception):
    """Base of the tree. `param` names the option or field at fault, where there is one."""

    # seconds after which whoever sent the error wants to be asked again, where it says so
    retry_after: float | None = None

    def __init__(self, code: ErrorCode, message: str, *, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.message, self.param)

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    def about(self, what: str) -> Self:
        """The same error, in a sentence that says of what."""
        message = self.message if what in self.message else f"{what}: {self.message}"
        return type(self)(self.code, message, param=self.param)


class RequestError(MMServeError):
    """The request cannot be served as it is; the sender has to change it."""


class DocumentError(RequestError):
    """A file or a page of it cannot be read."""


class EngineError(MMServeError):
    """The engine cannot answer now: dead, starting, draining, overloaded, or too slow."""


class SetupError(MMServeError):
    """A model, a dependency or memory is missing on this machine; the command line exits with 3."""


def _rebuild(kind: type[MMServeError], code: ErrorCode, message: str, param: str | None) -> MMServeError:
    return kind(code, message, param=param)
