"""Fetches what a request names by URL, from the hosts that the operator allows and from public addresses alone.

Nothing is allowed by default. A name is resolved once a hop, all of its addresses have to be public, and the connection
goes to one that was checked: whoever answers the name's second question differently gains nothing. Redirects are
followed by hand, each checked as the first URL was.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from mmserve.errors import RequestError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[IPAddress]]]
MIB = 1024**2
MAX_REDIRECTS = 4
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
# IPv6 prefixes that carry an IPv4 address which others route to: mapped, translated, 6to4, Teredo.
_CARRIERS = tuple(
    map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)


def is_public(address: IPAddress) -> bool:
    """Whether anybody on the internet could be meant by it."""
    if isinstance(address, ipaddress.IPv6Address) and any(address in network for network in _CARRIERS):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def resolve(host: str, port: int) -> list[IPAddress]:
    """The addresses of a name, as the system knows them. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


@dataclass(frozen=True)
class AllowedHosts:
    """Entries are `host`, `*.domain` or `*`, with the usual ports of http and https, or with `:port` for that alone."""

    entries: tuple[str, ...]

    def __contains__(self, place: tuple[str, int]) -> bool:
        return any(_matches(entry, *place) for entry in self.entries)


def _matches(entry: str, host: str, port: int) -> bool:
    pattern, _, wanted_port = entry.lower().partition(":")
    if port not in ([int(wanted_port)] if wanted_port.isdigit() else _DEFAULT_PORTS.values()):
        return False
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


@dataclass(frozen=True)
class MediaFetcher:
    """`timeout` is in seconds, over all hops. `resolve` and `permits` are there for tests."""

    allowed: AllowedHosts = AllowedHosts(())
    max_bytes: int = 32 * MIB
    timeout: float = 20.0
    resolve: Resolver = field(default=resolve)
    permits: Callable[[IPAddress], bool] = field(default=is_public)

    async def fetch(self, url: str) -> bytes:
        """What lies at `url`. Raises `RequestError`: `url_not_allowed`, `url_unreachable`, `body_too_large`."""
        if not self.allowed.entries:
            raise RequestError(
                "url_not_allowed",
                "this server fetches nothing by URL: send the file itself as a data URL (its operator can allow hosts"
                " with --allowed-media-hosts)",
            )
        transport = PinnedTransport(self.resolve, self.permits)
        try:
            async with (
                asyncio.timeout(self.timeout),
                httpx.AsyncClient(transport=transport, trust_env=False, timeout=self.timeout) as client,
            ):
                return await self._follow(client, url)
        except (TimeoutError, httpx.TimeoutException):
            raise _unreachable(f"took longer than {self.timeout:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _unreachable(f"could not be fetched ({type(error).__name__})") from None

    async def _follow(self, client: httpx.AsyncClient, url: str) -> bytes:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._opened(client, target) as response:
                if response.status_code not in _REDIRECTS:
                    return await self._read(response)
                target = self._checked(str(target.join(response.headers.get("location", ""))))
        raise _unreachable(f"redirects more than {MAX_REDIRECTS} times")

    def _checked(self, url: str) -> httpx.URL:
        try:
            target = httpx.URL(url)
            host = _plain_host(target)
        except (httpx.InvalidURL, ValueError, TypeError):
            raise RequestError("url_not_allowed", "the URL is malformed: write https://host/path") from None
        if target.scheme not in _DEFAULT_PORTS or not host:
            raise RequestError("url_not_allowed", "only http and https URLs are fetched, besides data URLs")
        if target.userinfo:
            raise RequestError("url_not_allowed", "URLs with a user name or password are not fetched")
        if (host, target.port or _DEFAULT_PORTS[target.scheme]) not in self.allowed:
            raise RequestError(
                "url_not_allowed",
                f"this server fetches nothing from {host}: send the file itself as a data URL (its operator can allow"
                " the host with --allowed-media-hosts)",
            )
        return target

    @contextlib.asynccontextmanager
    async def _opened(self, client: httpx.AsyncClient, url: httpx.URL) -> AsyncIterator[httpx.Response]:
        # What is not compressed cannot grow on arrival.
        headers = {"Accept-Encoding": "identity", "User-Agent": "mmserve"}
        async with client.stream("GET", url, headers=headers, follow_redirects=False) as response:
            yield response

    async def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise _unreachable(f"answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _unreachable("answers with compressed content that was not asked for")
        declared = response.headers.get("content-length", "0")
        content = bytearray()
        if not declared.isdigit() or int(declared) <= self.max_bytes:
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > self.max_bytes:
                    break
            else:
                return bytes(content)
        raise RequestError(
            "body_too_large", f"what lies at the URL is over {self.max_bytes:,} bytes: send a smaller file"
        )


class PinnedTransport(httpx.AsyncBaseTransport):
    """Resolves a request's host once, and connects to that very address; TLS still checks the host's name."""

    def __init__(self, resolve: Resolver, permits: Callable[[IPAddress], bool]) -> None:
        self._inner = httpx.AsyncHTTPTransport(trust_env=False)
        self._resolve = resolve
        self._permits = permits

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = _plain_host(request.url)
        address = await self._address(host, request.url.port or _DEFAULT_PORTS[request.url.scheme])
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=str(address)),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _address(self, host: str, port: int) -> IPAddress:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, ValueError):
            raise _unreachable("has a host name that cannot be resolved") from None
        if not addresses or not all(map(self._permits, addresses)):
            raise RequestError("url_not_allowed", f"{host} is not at a public address, and nothing is fetched from it")
        return addresses[0]


def _plain_host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().strip("[]").rstrip(".")


def _unreachable(what: str) -> RequestError:
    return RequestError("url_unreachable", f"the URL {what}: check it, or send the file itself as a data URL")


def parse_allowed_hosts(entries: Sequence[str], option: str = "allowed-media-hosts") -> AllowedHosts:
    """Raises `RequestError` for an entry that is a URL or has a port that is none."""
    for entry in entries:
        host, colon, port = entry.partition(":")
        if not host or "/" in entry or (colon and not port.isdigit()):
            raise RequestError(
                "invalid_request",
                f"--{option} {entry!r}: write a host, *.domain or *, with :port for other ports than usual",
                param=option.replace("-", "_"),
            )
    return AllowedHosts(tuple(entries))
