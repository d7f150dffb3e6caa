"""What browsers are told and asked: security headers, and which pages may speak to this server through a visitor."""

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.errors import RequestError
from mmserve.server.errors import error_response

# Of machinery that asks by address, or has no name for this server at all.
_FOR_ANYBODY = ("/health", "/ready")
_API = "/v1/"
_STATIC = "/static/"
# Nothing in an answer runs, not even in an uploaded file that is sent back.
_API_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self';"
    " font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ORIGIN = re.compile(r"https?://[^/\s@]+")


class SecurityHeaders:
    """On every answer, errors among them. What a route has set itself stays."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", _API_POLICY if path.startswith(_API) else _PAGE_POLICY)
                if not path.startswith(_STATIC):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers)


class BrowserGuard:
    """For a server without keys: a page of another site must not use it through a visitor's browser.

    A request by a name that is none of `hosts` may come from a page whose name was bound to this address after it was
    loaded (DNS rebinding); no `hosts` are all. One whose `Origin` is another site's may come from a form of that site.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self.app = app
        self._hosts = frozenset(host_name(host) for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sentence = None
        if scope["type"] == "http" and scope["path"] not in _FOR_ANYBODY:
            sentence = self._objection(Headers(scope=scope))
        if sentence is None:
            await self.app(scope, receive, send)
        else:
            await error_response(RequestError("forbidden", sentence))(scope, receive, send)

    def _objection(self, headers: Headers) -> str | None:
        host, origin = headers.get("host"), headers.get("origin")
        # A browser always sends a host.
        if host is not None and self._hosts and host_name(host) not in self._hosts:
            return "This server does not answer under this name: start it with --allowed-host NAME, or with API keys."
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.partition("://")[2].lower() != (host or "").lower():
            return (
                "A page of another site may not use this server: start it with --cors-origin ORIGIN or with API keys."
            )
        return None


def host_name(host: str) -> str:
    """`localhost` of `LOCALHOST.:8000`, `::1` of `[::1]:8000`."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](:\d*)?", host)
    if bracketed is not None:
        return bracketed[1].lower()
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.lower().removesuffix(".")


def check_origins(origins: Collection[str]) -> None:
    """Raises `RequestError` for what no browser would send."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RequestError(
                "invalid_request",
                f"--cors-origin takes scheme, host and port, as https://docs.example.org, or *: not {origin!r}",
                param="cors-origin",
            )
