"""`/v1/completions`, driven by the real openai client over a real socket."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine


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
    return httpx.post(f"{server.url}/v1/completions", json=body)


def test_a_whole_answer_has_all_that_openai_gives(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="scripted", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert engine.prompts[-1] == "abc"


def test_max_tokens_is_16_unless_given(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="scripted", prompt="abc")
    assert engine.params[-1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_prompts_come_as_text_or_ids_alone_or_together(
    client: openai.OpenAI, engine: ScriptedEngine, prompt: Any, expected: list[str]
) -> None:
    num_before = len(engine.prompts)
    answer = client.completions.create(model="scripted", prompt=prompt, n=2)
    assert engine.prompts[num_before:] == expected
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3 * len(expected)


def test_streamed_prompts_keep_their_numbers(client: openai.OpenAI) -> None:
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    last = None
    for chunk in client.completions.create(
        model="scripted", prompt=["x", "y"], n=2, stream=True, stream_options={"include_usage": True}
    ):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["Hello, world"] * 4
    assert reasons == ["stop"] * 4
    assert last is not None
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4 * len("Hello, world")


def test_logprobs_have_the_form_of_text_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="scripted", prompt="x", max_tokens=3, logprobs=1).choices[0].logprobs
    assert whole is not None
    assert whole.tokens == ["H", "e", "l"]
    assert whole.text_offset == [0, 1, 2]
    assert whole.token_logprobs == [-9999.0] * 3
    assert whole.top_logprobs is not None
    assert whole.top_logprobs[0] == {"H": -1.0}
    offsets = []
    for chunk in client.completions.create(model="scripted", prompt="x", max_tokens=3, logprobs=0, stream=True):
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None
        offsets += logprobs.text_offset or []
    assert offsets == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 50}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": ["a"] * 5}, None),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, body: dict[str, Any], param: str | None) -> None:
    response = post(server, **body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"
    assert response.json()["error"]["param"] == param


def test_what_asks_for_nothing_is_accepted(server: LiveServer) -> None:
    response = post(server, prompt="a", echo=False, suffix="", best_of=1, user="u", logprobs=None, stream=None)
    assert response.status_code == 200
    assert "logprobs" in response.json()["choices"][0]
