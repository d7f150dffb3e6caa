"""Requests of this server's own to others: to the hosts that its operator allows, at addresses that were checked.

A name is resolved once for a request, all of its addresses have to be permitted, and the connection goes to one of
them: whoever answers the name's second question differently gains nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from mmserve.errors import RequestError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[IPAddress]]]
_DEFAULT_PORTS = {"http": 80, "https": 443}
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

    def names(self, host: str, port: int) -> bool:
        """Whether an entry means this host and no other."""
        return any("*" not in entry and _matches(entry, host, port) for entry in self.entries)

    def __contains__(self, place: tuple[str, int]) -> bool:
        return any(_matches(entry, *place) for entry in self.entries)


def _matches(entry: str, host: str, port: int) -> bool:
    pattern, _, wanted_port = entry.lower().partition(":")
    if port not in ([int(wanted_port)] if wanted_port.isdigit() else _DEFAULT_PORTS.values()):
        return False
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


class PinnedTransport(httpx.AsyncBaseTransport):
    """Resolves a request's host once, and connects to that very address; TLS still checks the host's name."""

    def __init__(self, resolve: Resolver, permits: Callable[[IPAddress], bool]) -> None:
        self._inner = httpx.AsyncHTTPTransport(trust_env=False)
        self._resolve = resolve
        self._permits = permits

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = plain_host(request.url)
        address = await self._address(host, port_of(request.url))
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
            raise RequestError("url_unreachable", f"the name {host} cannot be resolved: check the URL") from None
        if not addresses or not all(map(self._permits, addresses)):
            raise RequestError("url_not_allowed", f"{host} is not at a public address, and is left alone")
        return addresses[0]


def checked_url(url: str, *, param: str | None = None) -> httpx.URL:
    """A URL to which a request may go if its host is allowed. Raises `RequestError` (`url_not_allowed`)."""
    try:
        target = httpx.URL(url)
        host = plain_host(target)
    except (httpx.InvalidURL, ValueError, TypeError):
        raise RequestError("url_not_allowed", "the URL is malformed: write https://host/path", param=param) from None
    if target.scheme not in _DEFAULT_PORTS or not host:
        raise RequestError("url_not_allowed", "the URL must be an http or https one", param=param)
    if target.userinfo:
        raise RequestError("url_not_allowed", "the URL must be without a user name and password", param=param)
    return target


def plain_host(url: httpx.URL) -> str:
    """Raises `ValueError` for a name that is none, which would be found out only when it is sent to."""
    _ = url.host
    return url.raw_host.decode("ascii").lower().strip("[]").rstrip(".")


def port_of(url: httpx.URL) -> int:
    return url.port or _DEFAULT_PORTS[url.scheme]


def parse_allowed_hosts(entries: Sequence[str], *, option: str = "allowed-media-hosts") -> AllowedHosts:
    """Raises `RequestError`, naming the option, for an entry that is a URL or has a port that is none."""
    for entry in entries:
        host, colon, port = entry.partition(":")
        if not host or "/" in entry or (colon and not port.isdigit()):
            raise RequestError(
                "invalid_request",
                f"--{option} {entry!r}: write a host, *.domain or *, with :port for other ports than usual",
                param=option.replace("-", "_"),
            )
    return AllowedHosts(tuple(entries))
