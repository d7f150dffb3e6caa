"""Fetching by URL: only allowed hosts, only public addresses, at every hop, and only so much and so long."""

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mmserve.errors import RequestError
from mmserve.jobs.outbound import AllowedHosts, IPAddress, Resolver, is_public, parse_allowed_hosts, resolve
from mmserve.server.media_fetch import MediaFetcher

LOOPBACK: IPAddress = ipaddress.ip_address("127.0.0.1")
CONTENT = b"\x89PNG picture"


class Handler(BaseHTTPRequestHandler):
    """Answers by path: /ok, /to?<location>, /big, /endless, /slow, /zipped, anything else 404."""

    requests: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.requests.append((self.headers["Host"], self.path))
        path, _, query = self.path.partition("?")
        answer: Callable[[str], None] = getattr(self, f"answer_{path.strip('/')}", self.answer_nothing)
        answer(query)

    def answer_ok(self, _query: str) -> None:
        self.send(200, CONTENT)

    def answer_to(self, query: str) -> None:
        self.send(302, b"", Location=query)

    def answer_big(self, _query: str) -> None:
        self.send(200, b"x" * 5000)

    def answer_zipped(self, _query: str) -> None:
        self.send(200, b"", **{"Content-Encoding": "gzip"})

    def answer_endless(self, _query: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            try:
                self.wfile.write(b"x" * 500)
            except OSError:
                return

    def answer_slow(self, _query: str) -> None:
        time.sleep(1.0)
        with suppress(OSError):
            self.answer_ok("")

    def answer_nothing(self, _query: str) -> None:
        self.send(404, b"")

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


class Site:
    """A server on loopback that goes by any name: the test's resolver says so, and permits loopback."""

    def __init__(self, port: int, requests: list[tuple[str, str]]) -> None:
        self.port = port
        self.requests = requests

    def url(self, path: str, host: str = "files.test") -> str:
        return f"http://{host}:{self.port}{path}"

    def fetcher(self, *hosts: str, names: Resolver | None = None, **settings: Any) -> MediaFetcher:
        allowed = AllowedHosts(tuple(f"{host}:{self.port}" for host in hosts or ("files.test",)))
        settings = {"max_bytes": 1000, "timeout": 5.0, "permits": lambda address: address == LOOPBACK, **settings}
        return MediaFetcher(allowed, resolve=names or answering(LOOPBACK), **settings)


@pytest.fixture
def site() -> Iterator[Site]:
    requests: list[tuple[str, str]] = []
    handler = type("BoundHandler", (Handler,), {"requests": requests})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield Site(port, requests)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answering(*addresses: IPAddress | str) -> Resolver:
    """A resolver that gives these, one lookup after the other, the last one again and again."""
    rest = [ipaddress.ip_address(str(address)) for address in addresses]

    async def lookup(_host: str, _port: int) -> list[IPAddress]:
        return [rest.pop(0) if len(rest) > 1 else rest[0]]

    return lookup


def refused(fetcher: MediaFetcher, url: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        asyncio.run(fetcher.fetch(url))
    assert 400 <= caught.value.http_status < 500
    return caught.value


def test_nothing_is_fetched_by_default() -> None:
    error = refused(MediaFetcher(), "https://example.com/a.png")
    assert error.code == "url_not_allowed"
    assert "--allowed-media-hosts" in error.message


def test_an_allowed_host_is_fetched_under_its_own_name(site: Site) -> None:
    assert asyncio.run(site.fetcher().fetch(site.url("/ok"))) == CONTENT
    assert site.requests == [(f"files.test:{site.port}", "/ok")]


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://files.test.evil.test/a.png",
        "http://files.test@evil.test/a.png",
        "http://user:secret@files.test/a.png",
        "ftp://files.test/a.png",
        "file:///etc/passwd",
        "gopher://files.test/",
        "http:///a.png",
        "http://[::1/a.png",
        "http://files.test:22/a.png",
        "//files.test/a.png",
        "http://127.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
    ],
)
def test_what_is_not_an_allowed_host_is_refused_without_a_lookup(url: str) -> None:
    async def lookup(_host: str, _port: int) -> list[IPAddress]:
        raise AssertionError("it was looked up")

    assert refused(MediaFetcher(AllowedHosts(("files.test",)), resolve=lookup), url).code == "url_not_allowed"


def test_entries_name_hosts_domains_and_ports() -> None:
    hosts = parse_allowed_hosts(["files.test", "*.cdn.test", "dev.test:8080"])
    assert ("files.test", 443) in hosts
    assert ("files.test", 8080) not in hosts
    assert ("a.cdn.test", 80) in hosts
    assert ("cdn.test", 80) not in hosts
    assert ("dev.test", 8080) in hosts
    assert ("dev.test", 443) not in hosts
    assert ("anything.test", 443) in parse_allowed_hosts(["*"])
    for entry in ("http://files.test", "files.test:x", ""):
        with pytest.raises(RequestError, match="allowed-media-hosts"):
            parse_allowed_hosts([entry])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
    ],
)
def test_addresses_that_are_nobodys_or_ours_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::6810:84e5"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.7", "::ffff:10.0.0.7", "fe80::1"])
def test_an_allowed_name_that_leads_inside_is_refused(address: str) -> None:
    fetcher = MediaFetcher(AllowedHosts(("*",)), resolve=answering(address))
    error = refused(fetcher, "http://innocent.test/a.png")
    assert error.code == "url_not_allowed"
    assert address not in error.message


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "[::ffff:7f00:1]", "localhost", "xn--", "xn--a"]
)
def test_loopback_in_disguise_is_refused_even_if_every_host_is_allowed(host: str) -> None:
    assert refused(MediaFetcher(AllowedHosts(("*",))), f"http://{host}/a.png").http_status == 400


@pytest.mark.parametrize("host", ["xn--", "xn--a"])
def test_a_name_that_is_none_is_refused(host: str) -> None:
    assert refused(MediaFetcher(AllowedHosts(("*",))), f"http://{host}/a.png").code == "url_not_allowed"


def test_the_systems_resolver_gives_addresses() -> None:
    assert LOOPBACK in asyncio.run(resolve("2130706433", 80))


def test_one_inner_address_among_outer_ones_is_enough_to_refuse() -> None:
    async def lookup(_host: str, _port: int) -> list[IPAddress]:
        return [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("10.0.0.1")]

    assert refused(MediaFetcher(AllowedHosts(("*",)), resolve=lookup), "http://a.test/").code == "url_not_allowed"


def test_a_name_is_resolved_once_and_that_address_is_used(site: Site) -> None:
    """The second answer of a name that changes its mind would be an inner address; it is never asked for."""
    fetcher = site.fetcher(names=answering(LOOPBACK, "169.254.169.254"))
    assert asyncio.run(fetcher.fetch(site.url("/ok"))) == CONTENT


def test_a_redirect_is_followed_and_checked_like_the_first_url(site: Site) -> None:
    fetcher = site.fetcher("files.test", "cdn.test")
    assert asyncio.run(fetcher.fetch(site.url(f"/to?{site.url('/ok', 'cdn.test')}"))) == CONTENT
    assert asyncio.run(fetcher.fetch(site.url("/to?/ok"))) == CONTENT
    assert [host.partition(":")[0] for host, _ in site.requests] == [
        "files.test",
        "cdn.test",
        "files.test",
        "files.test",
    ]


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "file:///etc/passwd",
        "//evil.test/",
        "http://files.test:22/",
    ],
)
def test_a_redirect_to_elsewhere_is_refused(site: Site, location: str) -> None:
    assert refused(site.fetcher(), site.url(f"/to?{location}")).code == "url_not_allowed"
    assert len(site.requests) == 1


def test_a_redirect_to_a_name_that_leads_inside_is_refused(site: Site) -> None:
    fetcher = site.fetcher("files.test", "inner.test", names=answering(LOOPBACK, "10.0.0.1"))
    assert refused(fetcher, site.url(f"/to?{site.url('/ok', 'inner.test')}")).code == "url_not_allowed"


def test_redirects_in_a_circle_end(site: Site) -> None:
    assert refused(site.fetcher(), site.url("/to?/to?/to")).code == "url_unreachable"
    assert len(site.requests) <= 6


@pytest.mark.parametrize("path", ["/big", "/endless"])
def test_too_many_bytes_are_not_waited_for(site: Site, path: str) -> None:
    assert refused(site.fetcher(), site.url(path)).code == "body_too_large"


@pytest.mark.parametrize("path", ["/missing", "/zipped"])
def test_an_answer_without_a_picture_is_a_dead_url(site: Site, path: str) -> None:
    assert refused(site.fetcher(), site.url(path)).code == "url_unreachable"


def test_a_slow_host_is_given_up(site: Site) -> None:
    assert refused(site.fetcher(timeout=0.2), site.url("/slow")).code == "url_unreachable"
    assert site.requests


def test_a_dead_port_and_an_unknown_name_are_dead_urls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dead = Site(port, [])
    assert refused(dead.fetcher(), dead.url("/ok")).code == "url_unreachable"

    async def unknown(_host: str, _port: int) -> list[IPAddress]:
        raise socket.gaierror("no such name")

    assert refused(dead.fetcher(names=unknown), dead.url("/ok")).code == "url_unreachable"
