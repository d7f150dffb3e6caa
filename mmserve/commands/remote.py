"""`--server`: a server that runs does the work, and this process only sends documents and writes results."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import httpx
import typer

from mmserve.errors import HTTP_STATUS, DocumentError, EngineError, MMServeError, RequestError, SetupError
from mmserve.pipelines.batch import Source, displayable

if TYPE_CHECKING:
    from mmserve.pipelines.events import PageReport
    from mmserve.pipelines.tasks import TaskName, TaskResult

_PANEL = "A running server"
_CONNECT_SECONDS, _SILENT_SECONDS = 10.0, 900.0
# A server that is gone for a moment is asked again after this long.
_GONE_SECONDS = 1.0
_DOCUMENT_CODES = frozenset(
    {"unsupported_type", "corrupt_document", "empty_document", "password_required", "page_too_large", "too_many_pages"}
    | {"page_timeout", "body_too_large"}
)
_CODES_OF_STATUS = {401: "unauthorized", 403: "forbidden", 429: "queue_full", 503: "engine_not_ready"}

Progress = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Where the work is done, if not in this process."""

    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=_PANEL,
            help="Let this server (see mmserve serve) do the work instead of loading a model.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", rich_help_panel=_PANEL, help="Its key; given as a variable, no list of processes shows it."
        ),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", rich_help_panel=_PANEL, help="Have it ask the model again even if it knows."),
    ] = False

    def check(self) -> None:
        """Raises `RequestError` for options that do not go together."""
        if self.no_cache and self.server is None:
            raise RequestError("invalid_request", "--no-cache goes with --server: only a server has a cache of results")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise RequestError("invalid_request", "--api-key has visible characters of ASCII only")
        if self.server is not None and not _is_http(self.server):
            raise RequestError(
                "invalid_request", f"--server needs a URL such as http://localhost:8000, not {self.server}"
            )


def _is_http(url: str) -> bool:
    try:
        target = httpx.URL(url)
        return target.scheme in ("http", "https") and bool(target.host)
    except (httpx.InvalidURL, ValueError):
        return False


@dataclass(frozen=True)
class RemoteResult:
    """A result as the server sent it, and as it would be had it been made in this process."""

    name: str
    data: Mapping[str, Any]
    result: "TaskResult"

    @property
    def pages(self) -> "Sequence[PageReport]":
        return self.result.pages

    def to_dict(self) -> dict[str, Any]:
        return {**self.data, "name": self.name}

    def to_markdown(self) -> str:
        return dataclasses.replace(self.result, name=self.name).to_markdown()


class RemoteServer:
    """An mmserve server over HTTP. Errors that may heal say after how many seconds (`retry_after`)."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    @classmethod
    @asynccontextmanager
    async def connected(cls, options: RemoteOptions, *, num_connections: int) -> "AsyncIterator[RemoteServer]":
        """Raises `SetupError` where nobody answers, `RequestError` where the key is not taken."""
        assert options.server is not None
        url = options.server.rstrip("/")
        async with httpx.AsyncClient(
            base_url=url,
            headers={} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"},
            timeout=httpx.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=num_connections + 1),
        ) as client:
            server = cls(client, url)
            await server._greet()
            yield server

    async def _greet(self) -> None:
        try:
            response = await self._client.get("/v1/models")
        except (httpx.TransportError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            raise SetupError(
                "missing_dependency",
                f"no answer from {self._url} ({reason}): start a server with mmserve serve, or correct --server",
            ) from None
        if response.status_code in (401, 403):
            raise _error_of(response)
        if response.status_code == 404:
            raise RequestError("not_found", f"{self._url} answers, but is no mmserve server", param="server")

    async def run(
        self, task: "TaskName", source: Source, fields: Mapping[str, str], on_progress: Progress
    ) -> RemoteResult:
        """`on_progress` gets the name and data of the server's events of progress.

        Raises what the server answers: `DocumentError`, `RequestError`, `EngineError`.
        """
        from mmserve.pipelines.from_dict import from_dict, result_type

        with source.path.open("rb") as file:
            try:
                data = await self._result(task, _file_name(source), file, fields, on_progress)
            except httpx.ConnectError as error:
                raise self._gone(error, "engine_dead") from None
            except httpx.TimeoutException as error:
                raise self._gone(error, "timeout") from None
            except httpx.TransportError as error:
                raise self._gone(error, "engine_not_ready") from None
        try:
            return RemoteResult(source.title, data, from_dict(result_type(task), data))
        except ValueError as error:
            message = f"the answer of {self._url} is not understood, as from another version of mmserve: {error}"
            raise EngineError("internal_error", message) from None

    def _gone(self, error: Exception, code: Any) -> EngineError:
        gone = EngineError(code, f"{self._url} cannot be reached any more ({str(error) or type(error).__name__})")
        gone.retry_after = _GONE_SECONDS
        return gone

    async def _result(
        self, task: "TaskName", name: str, file: IO[bytes], fields: Mapping[str, str], on_progress: Progress
    ) -> dict[str, Any]:
        form = {**fields, "stream": "true"}
        async with self._client.stream("POST", f"/v1/{task}", data=form, files={"file": (name, file)}) as response:
            if response.status_code != 200:
                await response.aread()
                raise _error_of(response)
            async for event in _events(response):
                match event:
                    case {"type": "result", "result": dict(result)}:
                        return result
                    case {"error": dict(error)}:
                        raise _error(error, 500, None)
                    case {"type": "progress", "event": str(kind)}:
                        on_progress(kind, event)
        raise self._gone(EOFError("the answer ended early"), "engine_not_ready")


def form_fields(options: Any, **more: Any) -> dict[str, str]:
    """Fields of a form for a task's options, those that were given, and for what else is not None."""
    values = {name: getattr(options, name) for name in options.__dataclass_fields__} | more
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in values.items()
        if value is not None
    }


def _file_name(source: Source) -> str:
    return displayable(source.path.name if source.shown is None else Path(source.name).name)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Data of server-sent events. Only line feeds part them: JSON has other line ends in its strings."""
    pending = b""
    async for chunk in response.aiter_bytes():
        *frames, pending = (pending + chunk).split(b"\n\n")
        for frame in frames:
            lines = [line.removeprefix(b"data: ") for line in frame.split(b"\n") if line.startswith(b"data: ")]
            if lines:
                data = json.loads(b"\n".join(lines))
                if isinstance(data, dict):
                    yield data


def _error_of(response: httpx.Response) -> MMServeError:
    try:
        error = response.json()["error"]
        assert isinstance(error, dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        error = {"message": f"{response.request.url.host} answered {response.status_code} {response.reason_phrase}"}
    after = response.headers.get("Retry-After", "")
    return _error(error, response.status_code, float(after) if after.isdigit() else None)


def _error(envelope: Mapping[str, Any], status: int, retry_after: float | None) -> MMServeError:
    """The error that the server had, as one of this process."""
    code: Any = envelope.get("code")
    if code not in HTTP_STATUS:
        code = _CODES_OF_STATUS.get(status, "invalid_request" if status < 500 else "internal_error")
    message = str(envelope.get("message") or f"the server answered {status}")
    known_status = HTTP_STATUS[code]
    kind: type[MMServeError] = RequestError
    if code in _DOCUMENT_CODES:
        kind = DocumentError
    elif known_status >= 500 or known_status == 429:
        kind = EngineError
    error = kind(code, message, param=envelope.get("param"))
    error.retry_after = retry_after
    return error
