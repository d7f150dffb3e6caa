"""Webhooks: signed, tried again until they are taken, and only to where the operator allows."""

import asyncio
import ipaddress
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from job_fakes import Office, document_text, ended, until
from sqlalchemy import Connection, func, select
from standardwebhooks import Webhook

from mmserve.errors import RequestError
from mmserve.jobs.database import Database
from mmserve.jobs.outbound import IPAddress
from mmserve.jobs.records import Job
from mmserve.jobs.service import JobService
from mmserve.jobs.settings import JobSettings
from mmserve.jobs.tables import deliveries
from mmserve.jobs.webhooks import RETRY_SECONDS, WebhookOptions, WebhookOutbox

pytest_plugins = ["job_fixtures"]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    """Answers with `statuses` in turn, then 200; `received` has headers and body of each request."""

    statuses: list[int] = field(default_factory=list)
    received: list[tuple[dict[str, str], str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=1"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def payload(self, place: int = -1) -> Any:
        """What was received, its signature checked."""
        headers, body = self.received[place]
        return Webhook(SECRET).verify(body, headers)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            receiver.received.append((dict(self.headers), body))
            self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield receiver
        server.shutdown()
        thread.join()


def service_of(office: Office, receiver: Receiver, **settings: Any) -> JobService:
    return office.service(webhook_hosts=(receiver.host,), webhook_secret=SECRET, **settings)


async def num_waiting(database: Database) -> int:
    def count(connection: Connection) -> int:
        return connection.execute(select(func.count()).select_from(deliveries)).scalar_one()

    return await database.read(count)


@asynccontextmanager
async def outbox_with_a_message(
    office: Office, url: str, **options: Any
) -> AsyncIterator[tuple[WebhookOutbox, Database]]:
    """One that delivers only when it is asked to, on a database that no service works on."""
    database = office.database()
    try:
        await database.migrate()
        outbox = WebhookOutbox(database, WebhookOptions(secret=SECRET, **options))
        outbox.check(url)
        job = Job(
            id="job-1",
            owner="anna",
            task="summarize",
            options={},
            status="done",
            created_at=0.0,
            expires_at=1.0,
            files=(),
            webhook_url=url,
        )
        await database.write(lambda connection: outbox.put_within(connection, job))
        yield outbox, database
    finally:
        await database.close()


async def all_delivered(service: JobService) -> None:
    while await num_waiting(service._database):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_the_end_of_a_job_is_told_with_a_signature(office: Office, receiver: Receiver) -> None:
    async def scenario() -> None:
        async with service_of(office, receiver) as service:
            file = await office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=receiver.url)
            done = await ended(service, job)
            await all_delivered(service)
        payload = receiver.payload()
        assert (len(receiver.received), payload["type"]) == (1, "job.done")
        assert payload["data"]["id"] == job.id
        assert payload["data"]["finished_at"] == int(done.finished_at or 0)
        assert "treaty was signed" not in receiver.received[0][1]

    asyncio.run(scenario())


def test_cancelled_and_failed_jobs_are_told_too(office: Office, receiver: Receiver) -> None:
    async def scenario() -> None:
        async with service_of(office, receiver) as service:
            slow = await office.add(service, document_text(1, title="obstacle"))
            job, _ = await service.jobs.create("anna", "summarize", [slow.id], {}, webhook_url=receiver.url)
            await until(lambda: office.desk.engine.num_running == 1)
            await service.jobs.cancel("anna", job.id)
            await all_delivered(service)
            assert receiver.payload()["type"] == "job.cancelled"
            office.desk.engine.failures = [ZeroDivisionError()]
            file = await office.add(service, document_text(1))
            await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=receiver.url)
            await until(lambda: len(receiver.received) == 2)
            assert receiver.payload()["type"] == "job.failed"
            assert receiver.payload()["data"]["error"]["code"] == "internal_error"

    asyncio.run(scenario())


def test_what_is_not_taken_is_sent_again_also_after_a_restart(office: Office, receiver: Receiver) -> None:
    receiver.statuses = [500, 302]

    async def scenario() -> None:
        async with service_of(office, receiver) as service:
            file = await office.add(service, document_text(1))
            await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=receiver.url)
            await until(lambda: len(receiver.received) == 1)
        assert [headers["webhook-id"] for headers, _ in receiver.received]
        office.clock.ahead += 61.0
        async with service_of(office, receiver) as service:
            await until(lambda: len(receiver.received) == 2)
        # The redirect was not followed, and is no success.
        office.clock.ahead += 301.0
        async with service_of(office, receiver) as service:
            await all_delivered(service)
        assert len(receiver.received) == 3
        assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
        times = [int(headers["webhook-timestamp"]) for headers, _ in receiver.received]
        assert times == sorted(set(times))
        assert len({body for _, body in receiver.received}) == 1

    asyncio.run(scenario())


def test_attempts_end_after_a_day(office: Office, receiver: Receiver) -> None:
    receiver.statuses = [503] * 100

    async def scenario() -> None:
        async with outbox_with_a_message(office, receiver.url, hosts=(receiver.host,)) as (outbox, database):
            assert await outbox.deliver_due() == 1
            for seconds in RETRY_SECONDS:
                office.clock.ahead += seconds - 1.5
                assert await outbox.deliver_due() == 0
                office.clock.ahead += 1.5
                assert await outbox.deliver_due() == 1
            assert await num_waiting(database) == 0
            office.clock.ahead += 48 * 3600
            assert await outbox.deliver_due() == 0
        assert len(receiver.received) == 1 + len(RETRY_SECONDS)
        assert 23 * 3600 < sum(RETRY_SECONDS) < 25 * 3600

    asyncio.run(scenario())


def test_a_receiver_that_is_gone_is_not_asked_again(office: Office, receiver: Receiver) -> None:
    receiver.statuses = [410]

    async def scenario() -> None:
        async with service_of(office, receiver) as service:
            file = await office.add(service, document_text(1))
            await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=receiver.url)
            await until(lambda: len(receiver.received) == 1)
            await all_delivered(service)
        assert len(receiver.received) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ((), "https://example.com/hook"),
        (("example.com",), "https://example.org/hook"),
        (("example.com",), "https://example.com:8443/hook"),
        (("example.com",), "ftp://example.com/hook"),
        (("example.com",), "https://anna:secret@example.com/hook"),
        (("example.com",), "https://example.com.evil.org/"),
        (("*.example.com",), "https://example.com/"),
        (("*",), "file:///etc/passwd"),
        (("*",), "https://exa mple/\0"),
        (("*",), ""),
    ],
)
def test_where_nothing_is_sent_a_job_is_refused(sqlite_office: Office, hosts: tuple[str, ...], url: str) -> None:
    async def scenario() -> None:
        secret = SECRET if hosts else None
        async with sqlite_office.service(webhook_hosts=hosts, webhook_secret=secret) as service:
            file = await sqlite_office.add(service, document_text(1))
            with pytest.raises(RequestError) as refused:
                await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=url)
            assert (refused.value.code, refused.value.http_status) == ("url_not_allowed", 400)
            assert refused.value.param == "webhook_url"
            assert await service.jobs.list("anna") == ([], False)

    asyncio.run(scenario())


@pytest.mark.parametrize(("entry", "num_received"), [("*", 0), ("hooks.test", 0), ("hooks.test:PORT", 1)])
def test_a_private_address_is_only_for_a_host_that_is_named(
    sqlite_office: Office, receiver: Receiver, entry: str, num_received: int
) -> None:
    """A name that anybody may have chosen must not lead into the operator's own network."""
    asked: list[tuple[str, int]] = []

    async def lead_inside(host: str, port: int) -> list[IPAddress]:
        asked.append((host, port))
        return [ipaddress.ip_address("127.0.0.1")]

    hosts = (entry.replace("PORT", str(receiver.port)),)
    port = receiver.port if "PORT" in entry else 80

    async def scenario() -> None:
        url = f"http://hooks.test:{port}/"
        async with outbox_with_a_message(sqlite_office, url, hosts=hosts, resolve=lead_inside) as (outbox, _):
            assert await outbox.deliver_due() == 1
        assert len(receiver.received) == num_received
        assert asked == [("hooks.test", port)]

    asyncio.run(scenario())


def test_a_host_that_is_allowed_no_more_gets_nothing(office: Office, receiver: Receiver) -> None:
    async def scenario() -> None:
        async with outbox_with_a_message(office, receiver.url, hosts=(receiver.host,)) as (_, database):
            assert await WebhookOutbox(database, WebhookOptions()).deliver_due() == 1
            assert await num_waiting(database) == 1
        assert receiver.received == []

    asyncio.run(scenario())


def test_a_receiver_that_does_not_answer_is_given_up_for_now(sqlite_office: Office) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host = f"127.0.0.1:{silent.getsockname()[1]}"
            url, hosts = f"http://{host}/", (host,)
            async with outbox_with_a_message(sqlite_office, url, hosts=hosts, timeout=0.1) as (outbox, database):
                assert await outbox.deliver_due() == 1
                assert await num_waiting(database) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hosts", "secret", "param"),
    [
        (("example.com",), None, "webhook_secret"),
        (("example.com",), "secret", "webhook_secret"),
        (("example.com",), "whsec_short", "webhook_secret"),
        (("example.com",), "whsec_!!!", "webhook_secret"),
        (("https://example.com",), SECRET, "webhook_hosts"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    sqlite_office: Office, hosts: tuple[str, ...], secret: str | None, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        JobSettings(data_dir=sqlite_office.folder, webhook_hosts=hosts, webhook_secret=secret)
    assert refused.value.param == param


def test_the_secret_is_not_shown(sqlite_office: Office) -> None:
    settings = JobSettings(data_dir=sqlite_office.folder, webhook_hosts=("example.com",), webhook_secret=SECRET)
    assert SECRET not in repr(settings) + repr(settings.webhooks)


def test_a_payload_is_plain_json(office: Office, receiver: Receiver) -> None:
    async def scenario() -> None:
        async with service_of(office, receiver) as service:
            file = await office.add(service, document_text(1), name="Vertrag\ud800.pdf")
            await service.jobs.create("anna", "summarize", [file.id], {}, webhook_url=receiver.url)
            await until(lambda: len(receiver.received) == 1)
        assert json.loads(receiver.received[0][1])["data"]["files"][0]["filename"] == "Vertrag\ud800.pdf"

    asyncio.run(scenario())


def test_a_fault_in_one_delivery_is_its_own(sqlite_office: Office, receiver: Receiver) -> None:
    async def meet_a_fault(_host: str, _port: int) -> list[IPAddress]:
        raise KeyError("a fault")

    async def scenario() -> None:
        url, hosts = receiver.url, (receiver.host,)
        async with outbox_with_a_message(sqlite_office, url, hosts=hosts, resolve=meet_a_fault) as (outbox, database):
            assert await outbox.deliver_due() == 1
            assert await num_waiting(database) == 1

    asyncio.run(scenario())


def test_a_name_that_is_none_is_refused_at_once(sqlite_office: Office) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            outbox = WebhookOutbox(service._database, WebhookOptions(secret=SECRET, hosts=("*",)))
            with pytest.raises(RequestError, match="malformed"):
                outbox.check("http://xn--a/")

    asyncio.run(scenario())
