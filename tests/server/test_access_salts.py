"""What one owner has sent is not noticeable to another: cached tokens, encoded pictures, prepared pages."""

import base64
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine
from vision_checkpoint import save_vision_model

from mmserve.commands.options import VisionOptions
from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.server.access import KeyRing
from mmserve.server.owners import LOCAL_OWNER, cache_salt_of
from mmserve.server.settings import AccessSettings
from mmserve.vision.page_types import PageLimits
from mmserve.vision.pages import PageOptions, PageReader

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
LINES = (f"alice:{ALICE}", f"bob:{BOB}")
SAMPLES = Path(__file__).parents[2] / "samples"
PICTURE = next(path for path in sorted(SAMPLES.iterdir()) if path.suffix == ".png")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    config = EngineConfig(
        model=str(save_vision_model(tmp_path_factory.mktemp("vision"))),
        num_threads=1,
        cache=CacheConfig(memory_bytes=8 * 1024**2),
    )
    client = EngineClient.start(config)
    client.wait_until_ready(60)
    yield client
    client.close()


@contextmanager
def served(engine: EngineClient, **access: Any) -> Iterator[LiveServer]:
    """A server with a pool of its own: what earlier ones have prepared is gone."""
    with ExitStack() as stack:
        reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
        stack.callback(reader.close)
        prompts = VisionOptions(num_preprocess_workers=1).open_prompts(engine, PageLimits())
        stack.callback(prompts.close)
        yield stack.enter_context(
            serving(engine, reader=reader, prompts=prompts, access=AccessSettings(keys=KeyRing(LINES), **access))
        )


def ask(server: LiveServer, key: str, path: str, body: dict[str, Any]) -> int:
    """Tokens of the prompt that were cached."""
    body = {"max_tokens": 2, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, headers={"X-Api-Key": key}, timeout=60)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def text(first_token: int) -> dict[str, Any]:
    return {"prompt": [first_token, *range(10, 90)]}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text * 40}]}


def picture() -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_cached_tokens_are_ones_own(engine: EngineClient) -> None:
    with served(engine) as server:
        for path, body in (("completions", text(10)), ("chat/completions", chat("one "))):
            assert ask(server, ALICE, path, body) == 0
            assert ask(server, BOB, path, body) == 0
            assert ask(server, ALICE, path, body) > 0
            assert ask(server, BOB, path, body) > 0


def test_cached_tokens_are_shared_where_the_operator_says_so(engine: EngineClient) -> None:
    with served(engine, share_caches=True) as server:
        for path, body in (("completions", text(20)), ("chat/completions", chat("two "))):
            assert ask(server, ALICE, path, body) == 0
            assert ask(server, BOB, path, body) > 0


@pytest.mark.parametrize("share_caches", [False, True])
def test_a_request_may_keep_itself_apart_within_its_owner(engine: EngineClient, share_caches: bool) -> None:
    first_token = 30 + share_caches
    with served(engine, share_caches=share_caches) as server:
        mine, others = ({**text(first_token), "cache_salt": salt} for salt in ("session 1", "session 2"))
        assert ask(server, ALICE, "completions", mine) == 0
        assert ask(server, ALICE, "completions", others) == 0
        assert ask(server, ALICE, "completions", text(first_token)) == 0
        assert ask(server, ALICE, "completions", mine) > 0
        if not share_caches:
            assert ask(server, BOB, "completions", mine) == 0, "another owner cannot choose into this one's part"


def test_pictures_are_prepared_and_encoded_for_each_owner(engine: EngineClient) -> None:
    with served(engine) as server:
        pool = server.app.state.server.prompts.pool

        def work(key: str) -> tuple[int, int, int]:
            before = (pool.stats.num_images, engine.stats.num_encoder_tokens)
            cached = ask(server, key, "chat/completions", picture())
            done = (pool.stats.num_images, engine.stats.num_encoder_tokens)
            return cached, done[0] - before[0], done[1] - before[1]

        cached, num_prepared, num_encoded = work(ALICE)
        assert (cached, num_prepared) == (0, 1)
        assert num_encoded > 0
        assert work(BOB) == (0, 1, num_encoded)
        cached, num_prepared, num_encoded = work(ALICE)
        assert (num_prepared, num_encoded) == (0, 0)
        assert cached > 0


def test_a_shared_picture_is_prepared_and_encoded_once(engine: EngineClient) -> None:
    with served(engine, share_caches=True) as server:
        pool = server.app.state.server.prompts.pool
        assert ask(server, ALICE, "chat/completions", picture()) == 0
        encoded = engine.stats.num_encoder_tokens
        assert ask(server, BOB, "chat/completions", picture()) > 0
        assert (pool.stats.num_images, engine.stats.num_encoder_tokens) == (1, encoded)


def test_salts_follow_owner_and_choice() -> None:
    salts = [cache_salt_of(owner, chosen) for owner in (LOCAL_OWNER, "a", "b") for chosen in (None, "x", "y")]
    assert salts[0] == b""
    assert len(set(salts)) == 9
    assert all(len(salt) == 16 for salt in salts[1:])
    assert cache_salt_of("a", None, is_shared=True) == b""
    assert cache_salt_of("a", "x", is_shared=True) == cache_salt_of("b", "x", is_shared=True)


@pytest.mark.parametrize("salt", ["", "x" * 257, 7])
def test_a_salt_is_a_short_text(salt: Any) -> None:
    with serving(ScriptedEngine()) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_without_keys_nothing_is_salted() -> None:
    engine = ScriptedEngine()
    with serving(engine) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200
        state = server.app.state.server
        assert state.prompts_for(LOCAL_OWNER) is state.prompts
    assert engine.salts == [b""]


def test_engine_ids_carry_the_id_of_the_request() -> None:
    engine = ScriptedEngine()
    with serving(engine) as server:
        for _ in range(2):
            headers = {"X-Request-Id": "order-7"}
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert len(set(engine.started)) == 2
    assert all(name.startswith("cmpl-") and name.endswith("@order-7") for name in engine.started)
