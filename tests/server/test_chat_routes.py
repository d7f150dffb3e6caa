"""`/v1/chat/completions`, driven by the real openai client over a real socket."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine, failing

from mmserve.errors import EngineError, RequestError

HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with serving(engine) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **body})


def test_a_whole_answer_has_all_that_openai_gives(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "scripted"
    assert answer.created > 1_600_000_000
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hi")
    assert answer.usage.completion_tokens == len("Hello, world")
    assert answer.usage.total_tokens == len("<user>hi") + len("Hello, world")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert engine.prompts[-1] == "<user>hi"


def test_a_streamed_answer_opens_with_the_role_and_ends_with_a_reason(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="org/alias", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, "org/alias", "chat.completion.chunk")
    }
    assert all(chunk.usage is None for chunk in chunks)


def test_frames_are_server_sent_events_that_end_in_done(server: LiveServer) -> None:
    response = post(server, stream=True, max_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: {") for frame in frames[:-2])
    assert '"usage"' not in response.text


def test_usage_comes_last_when_it_is_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, n=2, max_tokens=5, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens == len("<user>hi")
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_answers_are_kept_apart(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=HELLO, n=3)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [
        (index, "Hello, world") for index in range(3)
    ]
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="scripted", messages=HELLO, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello, world", "Hello, world"]


def test_all_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        max_tokens=3,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": -50},
        seed=11,
        stop="END",
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
    )
    params = engine.params[-1]
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (7, 2, 0.5, 0.9)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (dict(params.logit_bias), params.seed, params.stop, params.stop_token_ids) == ({65: -50}, 11, ("END",), (9,))
    assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.05, True)
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)


def test_null_means_the_default(server: LiveServer, engine: ScriptedEngine) -> None:
    names = (
        "n",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "max_tokens",
        "logit_bias",
        "top_k",
        "tools",
        "stream_options",
    )
    response = post(server, **{**dict.fromkeys(names), "stop": ["a", "b"]})
    assert response.status_code == 200
    assert engine.params[-1].temperature == 1.0
    assert engine.params[-1].stop == ("a", "b")
    assert engine.params[-1].max_tokens is None


def test_logprobs_carry_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["H", "e"]
    assert logprobs.content[0].bytes == [72]
    assert logprobs.content[0].logprob == -9999.0
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("H", -1.0), ("I", -2.0)]
    streamed = list(
        client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2, logprobs=True, stream=True)
    )
    contents = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [content[0].token for content in contents if content] == ["H", "e"]


def test_messages_of_openai_clients_are_understood(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    first = client.chat.completions.create(model="scripted", messages=HELLO).choices[0].message
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        first,
        {"role": "assistant", "content": "so", "tool_calls": None, "audio": None, "annotations": []},
    ]
    client.chat.completions.create(
        model="scripted",
        messages=messages,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="none",
        modalities=["text"],
    )
    assert engine.prompts[-1] == "<system>be brief<user>one\ntwo<assistant>Hello, world<assistant>so"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"refuse": True}}, None),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, extra: dict[str, Any], param: str | None) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=json.dumps({"messages": HELLO, **extra}),
        headers={"content-type": "application/json"},
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["code"] == "invalid_request"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("content", ["\ud800", "\\ud800"])
def test_half_a_character_is_refused_in_every_encoding(server: LiveServer, encoding: str, content: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "{content}"}}]}}'.encode(encoding, "surrogatepass")
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("name", ["max_tokens", "template_arguments", "name", "prompt"])
def test_a_template_argument_may_be_called_like_one_of_ours(server: LiveServer, name: str) -> None:
    assert post(server, chat_template_kwargs={name: 1}).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_a_picture_is_refused_with_a_way_out(server: LiveServer, kind: str) -> None:
    picture = {"type": kind, "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = post(server, messages=[{"role": "user", "content": [picture]}])
    assert response.status_code == 400
    assert "/v1/summarize" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages[0].content[0]"


def test_a_model_that_is_not_served_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    assert "scripted" in raised.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_keeps_its_status(stream: bool) -> None:
    too_long = RequestError("context_length_exceeded", "the prompt is too long", param="messages")
    with serving(failing(too_long, after=0)) as server:
        response = post(server, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "the prompt is too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_a_failure_in_the_middle_is_an_error_frame_and_the_end() -> None:
    dead = EngineError("engine_dead", "the engine died")
    with serving(failing(dead, after=3)) as server:
        frames = post(server, stream=True).text.strip().split("\n\n")
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError, match="the engine died"),
        ):
            list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True))
        assert post(server).status_code == 503
    assert frames[-1].startswith('data: {"error":{"message":"the engine died"')
    assert "[DONE]" not in frames[-1]


def test_a_fault_of_ours_says_nothing_about_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    with serving(failing(ValueError("secret detail"), after=2)) as server:
        whole, streamed = post(server), post(server, stream=True)
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "internal_error"
    assert "secret" not in whole.text + streamed.text
    assert '"code":"internal_error"' in streamed.text
    assert caplog.text.count("ValueError: secret detail") == 2


def test_the_template_gets_its_switches(server: LiveServer) -> None:
    assert post(server, chat_template_kwargs={"enable_thinking": False}).status_code == 200
