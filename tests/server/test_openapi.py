"""The served schema against what is served: requests made from it find no fault of the server's and nothing untold."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from document_server import TEXT, scripted
from hypothesis import HealthCheck, Phase, settings
from live_server import LiveServer, serving, wait_until
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mmserve.server.app import create_app
from mmserve.server.settings import ServerSettings
from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
BOUNDED = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = {"get", "post", "delete"}


@pytest.fixture(scope="module")
def server(reader: PageReader) -> Iterator[LiveServer]:
    # Any task can go on with this answer: extract wants an object.
    with serving(scripted(answer="{}"), reader=reader) as live:
        yield live


@pytest.fixture(scope="module")
def known(server: LiveServer) -> dict[str, str]:
    """A file and a job that are there."""
    with httpx.Client(base_url=server.url, timeout=60) as api:
        file_id = api.post("/v1/files", files={"file": ("a.txt", TEXT)}).json()["id"]
        job_id = api.post("/v1/jobs", json={"task": "summarize", "file_ids": [file_id]}).json()["id"]
        wait_until(lambda: api.get(f"/v1/jobs/{job_id}").json()["status"] == "done", seconds=60)
    return {"file_id": file_id, "job_id": job_id}


schema = schemathesis.openapi.from_dict(create_app(scripted(), PageReader(), ServerSettings()).openapi())


@schema.parametrize()
@BOUNDED
def test_what_is_made_from_the_schema_is_answered_as_it_says(case: Any, server: LiveServer) -> None:
    case.call_and_validate(server.url, checks=CHECKS, timeout=60)


@schema.include(path_regex=r"/v1/(files|jobs)/\{", method="GET").parametrize()
@BOUNDED
def test_what_is_there_is_answered_as_it_says(case: Any, server: LiveServer, known: dict[str, str]) -> None:
    case.path_parameters.update({name: known[name] for name in known.keys() & case.path_parameters.keys()})
    case.call_and_validate(server.url, checks=CHECKS, timeout=60)


def operations(server: LiveServer) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in httpx.get(f"{server.url}/openapi.json").json()["paths"].items():
        for method in item.keys() & OPERATIONS:
            yield f"{method} {path}", item[method]


def test_every_route_is_described(server: LiveServer) -> None:
    silent = [name for name, operation in operations(server) if not operation.get("description")]
    assert silent == []


def test_every_body_and_every_answer_in_json_has_an_example(server: LiveServer) -> None:
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]

    def has_example(media: dict[str, Any]) -> bool:
        if "example" in media or "examples" in media:
            return True
        told = media["schema"]
        named = [one["$ref"].rpartition("/")[2] for one in [told, *told.get("anyOf", ())] if "$ref" in one]
        return any("example" in schemas[name] or "examples" in schemas[name] for name in named)

    missing = []
    for name, operation in operations(server):
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        in_json = [body["content"].get("application/json") for body in bodies if "content" in body]
        missing += [name for media in in_json if media is not None and not has_example(media)]
    assert missing == []


def test_no_error_is_told_that_no_route_gives(server: LiveServer) -> None:
    text = json.dumps(httpx.get(f"{server.url}/openapi.json").json())
    assert "HTTPValidationError" not in text
