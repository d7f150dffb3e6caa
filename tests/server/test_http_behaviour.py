"""What holds on every route: errors, limits, disconnects, time limits, draining, health, metrics."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from scripted_engine import ScriptedEngine

import mmserve
from mmserve.engine.client import RequestTimings
from mmserve.engine.messages import EngineStats

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ENDLESS = "x" * 4000


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(ScriptedEngine(), max_json_bytes=2000, max_upload_bytes=4000) as live:
        yield live


@pytest.fixture
def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(answer=ENDLESS, seconds_per_token=0.01)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def start_raw(server: LiveServer, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(server.socket.getsockname() if server.thread.is_alive() else ("", 0))
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
def test_wrong_addresses_answer_in_the_envelope(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b'{"messages": [', "application/json", 400, "invalid_request"),
        (b"", "application/json", 400, "invalid_request"),
        (b"[1]", "application/json", 400, "invalid_request"),
        (b"null", "application/json", 400, "invalid_request"),
        (b"\xff\xfe", "application/json", 400, "invalid_request"),
        (b"[" * 1990, "application/json", 400, "invalid_request"),
        (b'{"messages": [], "temperature": ' + b"9" * 1900 + b"}", "application/json", 400, "invalid_request"),
        (b'{"messages": [], "temperature": NaN}', "application/json", 400, "invalid_request"),
        (b"{}", "text/plain", 415, "unsupported_type"),
        (b"{}", "multipart/form-data", 415, "unsupported_type"),
        (b"{}", "", 415, "unsupported_type"),
    ],
)
def test_a_body_that_is_no_request_is_the_senders_fault(
    server: LiveServer, path: str, content: bytes, content_type: str, status: int, code: str
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = httpx.post(server.url + path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert error_of(response)["code"] == code


@pytest.mark.parametrize("path", [CHAT, "/v1/summarize"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_cap_is_refused_however_it_is_sent(server: LiveServer, path: str, is_chunked: bool) -> None:
    # A part that begins as it should: a parser that gives up at once would answer before the cap is reached.
    start = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    chunks = [start, *[b"x" * 1000] * 3000]
    content: Any = iter(chunks) if is_chunked else b"".join(chunks)
    content_type = "application/json" if path == CHAT else "multipart/form-data; boundary=b"
    response = httpx.post(server.url + path, content=content, headers={"content-type": content_type})
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_answer_that_needs_no_body_reaches_a_sender_that_is_still_sending(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/nothing/here", content=iter([b"x" * 1000] * 3000))
    assert error_of(response)["code"] == "not_found"


def test_a_sender_that_asks_first_is_told_before_it_sends(server: LiveServer) -> None:
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
            "Expect: 100-continue\r\nContent-Length: 99999\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", [CHAT, "/v1/summarize"])
def test_a_sender_that_stops_in_the_middle_is_not_waited_for(
    server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.server.limits.STALL_SECONDS", 0.2)
    monkeypatch.setattr("mmserve.server.limits.LINGER_SECONDS", 0.2)
    content_type = "application/json" if path == CHAT else "multipart/form-data; boundary=b"
    with socket.create_connection(server.socket.getsockname(), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\nContent-Length: 999\r\n\r\n"
        connection.sendall(f"{head}--b".encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_stalled" in answer
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_models_are_listed_under_all_their_names(server: LiveServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["scripted", "org/alias"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert httpx.get(f"{server.url}/v1/models/org/alias").json()["id"] == "org/alias"


def test_version_docs_and_schema(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": mmserve.__version__}
    assert "swagger" in httpx.get(f"{server.url}/docs").text
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {CHAT, "/v1/completions", "/v1/summarize", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)


@pytest.mark.parametrize(
    ("state", "health", "ready", "code"),
    [("starting", 200, 503, "engine_not_ready"), ("ready", 200, 200, None), ("dead", 503, 503, "engine_dead")],
)
def test_health_is_about_life_and_ready_about_work(state: Any, health: int, ready: int, code: str | None) -> None:
    with serving(ScriptedEngine(state=state)) as server:
        assert httpx.get(f"{server.url}/health").status_code == health
        readiness = httpx.get(f"{server.url}/ready")
        answer = httpx.post(server.url + CHAT, json=HELLO)
    assert readiness.status_code == ready
    assert answer.status_code == ready
    if code is not None:
        assert error_of(answer)["code"] == error_of(readiness)["code"] == code
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_client_that_leaves_aborts_its_request(slow_engine: ScriptedEngine, path: str, stream: bool) -> None:
    body = {"stream": stream, **(HELLO if path == CHAT else {"prompt": ["hi", "ho"], "max_tokens": 3000})}
    with serving(slow_engine) as server:
        connection = start_raw(server, body, path)
        wait_until(lambda: slow_engine.started)
        if stream:
            assert connection.recv(1000)
        connection.close()
        wait_until(lambda: slow_engine.aborted)
        wait_until(lambda: server.app.state.server.gate.num_in_flight == 0)
    assert sorted(slow_engine.aborted) == sorted(slow_engine.started)
    assert slow_engine.finished == []


def test_a_request_over_its_time_is_504(slow_engine: ScriptedEngine) -> None:
    with serving(slow_engine, request_timeout=0.2) as server:
        whole = httpx.post(server.url + CHAT, json=HELLO)
        streamed = httpx.post(server.url + CHAT, json={**HELLO, "stream": True})
    assert whole.status_code == 504
    assert error_of(whole)["code"] == "timeout"
    assert streamed.status_code == 200
    assert '"code":"timeout"' in streamed.text.strip().rpartition("\n\n")[2]
    assert len(slow_engine.aborted) == 2


def test_a_full_queue_is_429_and_recovers(slow_engine: ScriptedEngine) -> None:
    with serving(slow_engine) as server, ThreadPoolExecutor() as pool:
        url = server.url + CHAT
        running = [pool.submit(httpx.post, url, json={**HELLO, "max_tokens": 100}) for _ in range(4)]
        wait_until(lambda: len(slow_engine.started) == 4)
        for stream in (False, True):
            refused = httpx.post(url, json={**HELLO, "stream": stream})
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) > 0
        assert [future.result().status_code for future in running] == [200] * 4
        assert httpx.post(url, json={**HELLO, "max_tokens": 1}).status_code == 200
        slow_engine.stats = EngineStats(num_requests_waiting=2)
        assert httpx.post(url, json=HELLO).status_code == 429


def test_draining_lets_running_requests_finish_and_takes_no_more(slow_engine: ScriptedEngine) -> None:
    with serving(slow_engine, shutdown_timeout=20) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(httpx.post, server.url + CHAT, json={**HELLO, "max_tokens": 60})
        wait_until(lambda: slow_engine.started)
        server.server.should_exit = True
        wait_until(lambda: server.app.state.server.drain.has_begun)
        with pytest.raises(httpx.ConnectError):
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, seconds=5)
        assert running.result().json()["choices"][0]["message"]["content"] == "x" * 60
    assert slow_engine.aborted == []


def test_a_drain_that_takes_too_long_ends_requests_with_an_answer(slow_engine: ScriptedEngine) -> None:
    with serving(slow_engine, shutdown_timeout=0.3) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, server.url + CHAT, json=HELLO)
        streamed = pool.submit(httpx.post, server.url + CHAT, json={**HELLO, "stream": True})
        wait_until(lambda: len(slow_engine.started) == 2)
        server.server.should_exit = True
        assert whole.result().status_code == 503
        assert error_of(whole.result())["code"] == "shutting_down"
        assert '"code":"shutting_down"' in streamed.result().text
    assert len(slow_engine.aborted) == 2


def timings(**changes: Any) -> RequestTimings:
    usual: dict[str, Any] = {
        "queue_seconds": 0.2,
        "time_to_first_token": 0.7,
        "inter_token_latencies": (0.03, 0.03, 0.5),
        "e2e_seconds": 1.3,
        "num_prompt_tokens": 100,
        "num_output_tokens": 4,
        "finish_reason": "stop",
    }
    return RequestTimings(**{**usual, **changes})


def test_metrics_have_the_promised_names_and_true_values() -> None:
    stats = EngineStats(
        num_requests_running=3,
        num_requests_waiting=2,
        kv_cache_usage_ratio=0.25,
        prefix_cache_queries=500,
        prefix_cache_hits=125,
        num_preemptions=7,
        encoder_cache_queries=12,
        encoder_cache_hits=5,
        num_encoder_runs=2,
        num_encoder_tokens=640,
        encoder_seconds=1.5,
    )
    engine = ScriptedEngine(stats=stats)
    with serving(engine) as server:
        for report in (
            timings(),
            timings(finish_reason="abort", num_output_tokens=0, time_to_first_token=None, inter_token_latencies=()),
        ):
            for observer in engine.observers:
                threading.Thread(target=observer, args=(report,)).start()
        wait_until(lambda: 'mmserve_request_success_total{finished_reason="abort"} 1.0' in scrape(server))
        wait_until(lambda: "mmserve_e2e_request_latency_seconds_count 2.0" in scrape(server))
        lines = scrape(server).splitlines()
    assert {line for line in lines if not line.startswith(("#", "mmserve_http_")) and "_bucket" not in line} == {
        "mmserve_num_requests_running 3.0",
        "mmserve_num_requests_waiting 2.0",
        "mmserve_num_requests_queued 0.0",
        "mmserve_num_documents_queued 0.0",
        "mmserve_kv_cache_usage_ratio 0.25",
        "mmserve_prefix_cache_queries_total 500.0",
        "mmserve_prefix_cache_hits_total 125.0",
        "mmserve_num_preemptions_total 7.0",
        "mmserve_engine_restarts_total 0.0",
        "mmserve_jobs_running 0.0",
        "mmserve_encoder_cache_queries_total 12.0",
        "mmserve_encoder_cache_hits_total 5.0",
        "mmserve_encoder_tokens_total 640.0",
        "mmserve_encoder_seconds_count 2.0",
        "mmserve_encoder_seconds_sum 1.5",
        "mmserve_preprocess_seconds_count 0.0",
        "mmserve_preprocess_seconds_sum 0.0",
        "mmserve_prompt_tokens_total 200.0",
        "mmserve_generation_tokens_total 4.0",
        'mmserve_request_success_total{finished_reason="stop"} 1.0',
        'mmserve_request_success_total{finished_reason="abort"} 1.0',
        "mmserve_time_to_first_token_seconds_count 1.0",
        "mmserve_time_to_first_token_seconds_sum 0.7",
        "mmserve_inter_token_latency_seconds_count 3.0",
        "mmserve_inter_token_latency_seconds_sum 0.56",
        "mmserve_request_queue_time_seconds_count 2.0",
        "mmserve_request_queue_time_seconds_sum 0.4",
        "mmserve_e2e_request_latency_seconds_count 2.0",
        "mmserve_e2e_request_latency_seconds_sum 2.6",
    }
    assert engine.observers == []


def scrape(server: LiveServer) -> str:
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return response.text


def test_two_apps_have_metrics_of_their_own() -> None:
    with serving(ScriptedEngine()) as first, serving(ScriptedEngine()) as second:
        first.app.state.server.metrics.observe(timings())
        assert "mmserve_prompt_tokens_total 100.0" in scrape(first)
        assert "mmserve_prompt_tokens_total 0.0" in scrape(second)
