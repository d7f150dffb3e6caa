"""Every error that a user can meet: a stable code, the HTTP status it maps to, and a sentence that says what to do."""

import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, Self

ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "forbidden",
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
    "page_timeout",
    "password_required",
    "output_truncated",
    "not_found",
    "method_not_allowed",
    "idempotency_conflict",
    "queue_full",
    "rate_limited",
    "internal_error",
    "engine_dead",
    "engine_not_ready",
    "shutting_down",
    "missing_dependency",
    "model_unavailable",
    "insufficient_memory",
    "timeout",
    "storage_unavailable",
    "storage_full",
]

HTTP_STATUS: Mapping[ErrorCode, int] = MappingProxyType(
    {
        "invalid_request": 400,
        "invalid_schema": 400,
        "context_length_exceeded": 400,
        "images_not_supported": 400,
        "url_not_allowed": 400,
        "url_unreachable": 400,
        "unauthorized": 401,
        "forbidden": 403,
        "model_not_found": 404,
        "not_found": 404,
        "method_not_allowed": 405,
        "body_stalled": 408,
        "idempotency_conflict": 409,
        "body_too_large": 413,
        "page_too_large": 413,
        "too_many_pages": 413,
        "too_many_images": 413,
        "unsupported_type": 415,
        "corrupt_document": 422,
        "empty_document": 422,
        "page_timeout": 422,
        "password_required": 422,
        "output_truncated": 422,
        "queue_full": 429,
        "rate_limited": 429,
        "internal_error": 500,
        "engine_dead": 503,
        "engine_not_ready": 503,
        "shutting_down": 503,
        "missing_dependency": 503,
        "model_unavailable": 503,
        "insufficient_memory": 503,
        "storage_unavailable": 503,
        "timeout": 504,
        "storage_full": 507,
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

    def to_dict(self) -> dict[str, str | None]:
        """The error object that clients of OpenAI's interface understand."""
        return {"message": self.message, "type": self._type, "param": self.param, "code": self.code}

    @property
    def _type(self) -> str:
        if self.http_status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.http_status < 500 else "server_error"

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


class StorageError(MMServeError):
    """Files or results cannot be kept or read now: the disk is full, the database locked, a folder read-only."""


class SetupError(MMServeError):
    """A model, a dependency or memory is missing on this machine; the command line exits with 3."""


def frames_of(error: BaseException) -> str:
    """A traceback that names its exceptions without their words, which may quote a document or a key."""
    return "\nIt came from:\n".join(
        "".join([*traceback.format_tb(each.__traceback__), _named(each)]) for each in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _named(error: BaseException) -> str:
    reason = error.code if isinstance(error, MMServeError) else getattr(error, "strerror", None)
    return type(error).__name__ + (f": {reason}" if reason else "")


def _rebuild(kind: type[MMServeError], code: ErrorCode, message: str, param: str | None) -> MMServeError:
    return kind(code, message, param=param)
