"""How long threads spin: set for a process before PyTorch is there, unless its user has."""

import os
import subprocess
import sys

import pytest

from mmserve.kernels.thread_waits import usual_waits, wait_briefly

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def seen_by_a_process() -> list[str]:
    script = f"import os; print(*[os.environ.get(name, '-') for name in {NAMES}])"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_waits_are_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_briefly()
    assert seen_by_a_process() == ["1000", "-"]
    with usual_waits():
        assert seen_by_a_process() == ["-", "-"]
    assert seen_by_a_process() == ["1000", "-"]


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_a_users_choice_stands(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    wait_briefly()
    with usual_waits():
        assert {key: os.environ.get(key) for key in NAMES} == dict.fromkeys(NAMES) | {name: value}


def test_the_command_line_does_so_before_pytorch_is_there() -> None:
    script = (
        "import sys, mmserve.cli as cli; assert 'torch' not in sys.modules\n"
        "cli.app = lambda **_: None\ncli.main()\nimport os; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "False"]
