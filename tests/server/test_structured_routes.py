"""The form of an answer over HTTP: which fields there are, and the whole way to a model of random weights."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from live_server import LiveServer, serving, wait_until
from reference_models import save_reference_model
from scripted_engine import ScriptedEngine

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.request import StructuredOutput

HELLO: Any = [{"role": "user", "content": "The invoice is due"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"vendor": {"type": "string", "maxLength": 6}, "total": {"type": "integer", "maximum": 99}},
    "required": ["vendor", "total"],
    "additionalProperties": False,
}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
PATHS = ("/v1/chat/completions", "/v1/completions")


def ask(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    prompt = {"messages": HELLO} if path == PATHS[0] else {"prompt": "The invoice"}
    return httpx.post(f"{server.url}{path}", json=prompt | body, timeout=120)


# Which fields there are


@pytest.fixture(scope="module")
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def script_server(scripted: ScriptedEngine) -> Iterator[LiveServer]:
    with serving(scripted) as live:
        yield live


def response_format(schema: dict[str, Any] | None = SCHEMA, **fields: Any) -> dict[str, Any]:
    named = {"name": "invoice"} | ({} if schema is None else {"schema": schema}) | fields
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, ("regex", "a", False)),
        ({"response_format": {"type": "json_object"}}, ("json_object", "", False)),
        (response_format(), ("json_schema", SCHEMA_TEXT, True)),
        (response_format(strict=None, description="of March"), ("json_schema", SCHEMA_TEXT, True)),
        (response_format(strict=True), ("json_schema", SCHEMA_TEXT, False)),
        (response_format(None), ("json_object", "", False)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA_TEXT, False)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, ("json_schema", SCHEMA_TEXT, False)),
        ({"structured_outputs": {"regex": "[ab]", "json_object": False}}, ("regex", "[ab]", False)),
        ({"structured_outputs": {"choice": ["é", "b"]}}, ("choice", '["é","b"]', False)),
        ({"structured_outputs": {"grammar": "start: x"}}, ("grammar", "start: x", False)),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "", False)),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA_TEXT, False)),
        ({"guided_json": SCHEMA_TEXT}, ("json_schema", SCHEMA_TEXT, False)),
        ({"guided_regex": "a+"}, ("regex", "a+", False)),
        ({"guided_choice": ["a"]}, ("choice", '["a"]', False)),
        ({"guided_grammar": "root ::= x"}, ("grammar", "root ::= x", False)),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_every_field_reaches_the_engine(
    script_server: LiveServer, scripted: ScriptedEngine, path: str, body: dict[str, Any], expected: Any
) -> None:
    assert ask(script_server, path, **body).status_code == 200
    form = scripted.params[-1].structured
    assert (None if form is None else (form.kind, form.text, form.lenient)) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_request"),
        ({"response_format": "json"}, "response_format", "invalid_request"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_request"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format",
            "invalid_request",
        ),
        (response_format({}, stric=True), "response_format.json_schema.stric", "invalid_request"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_request"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_request"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "invalid_request"),
        (response_format() | {"guided_regex": "a"}, "guided_regex", "invalid_request"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "invalid_request"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_request",
        ),
        ({"guided_choice": []}, "guided_choice", "invalid_schema"),
        ({"guided_choice": [""]}, "guided_choice", "invalid_schema"),
        ({"guided_json": "{"}, "guided_json", "invalid_schema"),
        ({"guided_json": "[]"}, "guided_json", "invalid_schema"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "invalid_schema"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "invalid_schema"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_wrong_with_a_form_is_named(
    script_server: LiveServer, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = ask(script_server, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.partition(".")[0] in error["message"]


def test_a_schema_nested_beyond_reason_is_refused(script_server: LiveServer) -> None:
    for depth in (300, 900, 5000):
        body = (
            '{"messages": [{"role": "user", "content": "a"}], "guided_json": '
            + '{"a":' * depth
            + "1"
            + "}" * depth
            + "}"
        )
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{script_server.url}{PATHS[0]}", content=body, headers=headers)
        assert response.status_code in (200, 400)


# The whole way


@pytest.fixture(scope="module", params=[False, True], ids=["thread", "process"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = save_reference_model("llama", tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        model=str(folder),
        served_model_name=("tiny",),
        num_threads=1,
        use_process=request.param,
        cache=CacheConfig(memory_bytes=8 * 1024**2),
    )
    engine = EngineClient.start(config)
    try:
        with serving(engine) as live:
            wait_until(lambda: httpx.get(f"{live.url}/ready").status_code == 200, seconds=60)
            yield live
    finally:
        engine.close()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_all_of_several_answers_follow_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=4, max_tokens=100, seed=3, **response_format(strict=True)
    )
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) > 1
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for text in texts:
        assert text is not None
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 100, **response_format()}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_cut_by_max_tokens_says_so(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, **response_format())
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_choice": ["invoice", "letter"]}, "invoice|letter"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= [ab] "-" [ab]'}}, "[ab]-[ab]"),
    ],
)
def test_completions_take_forms_too(server: LiveServer, body: dict[str, Any], pattern: str) -> None:
    answer = ask(server, PATHS[1], max_tokens=30, **body).json()["choices"][0]
    assert re.fullmatch(pattern, answer["text"])
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "banana"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "multipleOf": 123_456_789},
        {"properties": {f"p{i}": {"type": "string"} for i in range(2500)}},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_a_schema_that_cannot_be_followed_is_a_400_for_its_sender_alone(
    server: LiveServer, schema: dict[str, Any], stream: bool
) -> None:
    with ThreadPoolExecutor() as pool:
        neighbour = pool.submit(ask, server, PATHS[0], max_tokens=60, ignore_eos=True)
        refused = ask(server, PATHS[0], stream=stream, n=2, **response_format(schema))
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "invalid_schema"
        assert refused.json()["error"]["param"] == "response_format"
        assert neighbour.result().json()["usage"]["completion_tokens"] == 60


def test_many_forms_at_once_beside_plain_requests(server: LiveServer) -> None:
    def asked(i: int) -> tuple[int, str]:
        body = {"guided_regex": f"{i}[a-z]{{{i}}}"} if i % 2 else {}
        return i, ask(server, PATHS[1], max_tokens=30, **body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        for i, text in pool.map(asked, range(16)):
            assert i % 2 == 0 or re.fullmatch(f"{i}[a-z]{{{i}}}", text)


def test_the_form_is_equal_whatever_field_it_came_in() -> None:
    forms = {StructuredOutput(kind="regex", text="a", param=param) for param in ("guided_regex", "structured_outputs")}
    assert len(forms) == 1
