"""The options of `mmserve serve` about access, and a server that was started with them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference_models import save_reference_model
from test_serve_command import COMMAND, serving_process

from mmserve.commands.access import AccessOptions
from mmserve.errors import RequestError
from mmserve.server.settings import AccessSettings

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMSERVE_API_KEYS", raising=False)


def settings(host: str = "127.0.0.1", address: str = "127.0.0.1", **options: Any) -> AccessSettings:
    return AccessOptions(**options).to_settings(host, address)


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "::1"), ("box", "127.0.1.1")])
def test_this_machine_needs_no_key_and_answers_to_its_names(host: str, address: str) -> None:
    chosen = settings(host, address)
    assert chosen.keys is None
    assert {"localhost", "127.0.0.1", "[::1]", host} == set(chosen.allowed_hosts)
    more = settings(host, address, allowed_host=["mmserve.lan"])
    assert set(more.allowed_hosts) == set(chosen.allowed_hosts) | {"mmserve.lan"}


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0", "::ffff:0.0.0.0"])
def test_other_machines_need_keys_or_insecure(address: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--insecure") as caught:
        settings(address, address)
    assert "--api-keys-file" in str(caught.value)
    open_to_all = settings(address, address, insecure=True)
    assert (open_to_all.keys, open_to_all.allowed_hosts) == (None, ())
    named = settings(address, address, insecure=True, allowed_host=["mmserve.lan"])
    assert "mmserve.lan" in named.allowed_hosts
    path = tmp_path / "keys"
    path.write_text(f"alice:{ALICE}\n")
    keys = settings(address, address, api_keys_file=path).keys
    assert keys is not None
    assert keys.owner_of(ALICE.encode())


def test_keys_of_the_variable_are_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSERVE_API_KEYS", f"alice:{ALICE}, {BOB}\n")
    keys = settings("0.0.0.0", "0.0.0.0").keys
    assert keys is not None
    assert keys.owner_of(ALICE.encode())
    assert keys.owner_of(BOB.encode())
    with pytest.raises(RequestError, match="--insecure"):
        settings("0.0.0.0", "0.0.0.0")


@pytest.mark.parametrize("value", ["", " , ", "short"])
def test_a_variable_without_keys_does_not_open_the_server(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSERVE_API_KEYS", value)
    with pytest.raises(RequestError, match="MMSERVE_API_KEYS"):
        settings()


def test_all_options_arrive() -> None:
    chosen = settings(
        open_metrics=True, open_docs=True, share_caches=True, rate_limit="5/second", cors_origin=["https://a.example"]
    )
    assert (chosen.open_metrics, chosen.open_docs, chosen.share_caches) == (True, True, True)
    assert (chosen.rate_limit, chosen.cors_origins) == ("5/second", ("https://a.example",))


def test_the_command_refuses_to_listen_without_keys() -> None:
    ended = subprocess.run([*COMMAND, "--host", "0.0.0.0", "--port", "0"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("mmserve: other machines could use the server at 0.0.0.0 without a key")
    assert ended.stderr.count("\n") == 1


def test_a_server_with_keys_keeps_them_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_reference_model("llama", tmp_path / "tiny")
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nalice:{ALICE}\n")
    monkeypatch.setenv("MMSERVE_API_KEYS", BOB)
    arguments = ("--port", "0", "--api-keys", str(keys), "--rate-limit", "2/hour", "--open-metrics", "--verbose")
    with serving_process(model, *arguments) as served:
        url = served.url()
        served.wait_until_ready(url)
        body = {"prompt": "a", "max_tokens": 1}

        def ask(**headers: str) -> int:
            return httpx.post(f"{url}/v1/completions?key={ALICE}", json=body, headers=headers, timeout=60).status_code

        statuses = [ask(), *(ask(Authorization=f"Bearer {ALICE}") for _ in range(3))]
        assert statuses == [401, 200, 200, 429]
        assert ask(**{"X-Api-Key": BOB}) == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert httpx.get(f"{url}/docs").status_code == 401
        keys.write_text("short")
        assert httpx.get(f"{url}/v1/models", headers={"X-Api-Key": ALICE}).status_code == 200
        children = subprocess.run(
            [sys.executable, "-c", _ENVIRONMENTS, str(served.process.pid)], capture_output=True, text=True, check=True
        )
        assert int(children.stdout.split()[0]) >= 1
        assert BOB not in children.stdout
        served.process.terminate()
        code, said = served.end()
    assert code == 0
    assert "POST /v1/completions 200" in said
    assert "stay in force" in said
    for secret in (ALICE, BOB):
        assert secret not in said


# Prints how many children a process has, and the environment of each.
_ENVIRONMENTS = """
import psutil, sys
children = psutil.Process(int(sys.argv[1])).children(recursive=True)
print(len(children), *(child.environ() for child in children))
"""
