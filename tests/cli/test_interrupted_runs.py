"""Runs that end at any moment: whatever was done stays done, and the next run gives what one alone would have given."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import cli_fakes
import pytest

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

NUM_DOCUMENTS = 150
COMMAND = [sys.executable, cli_fakes.__file__, "shout", "in", "-r", "-o", "out", "-q", "--resume", "--model", "m"]


@pytest.fixture
def documents(empty_place: None) -> None:
    """Each third one is a copy of another."""
    for i in range(NUM_DOCUMENTS):
        path = Path(f"in/{i % 7}/{i:03}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"pause {i - (i % 3 == 2)}")


def outputs() -> dict[str, str]:
    return {str(path): path.read_text() for path in Path("out").rglob("*.txt.md")}


def journaled() -> int:
    journal = Path("out/.mmserve-done.jsonl")
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_may_end_at_any_moment(ending: signal.Signals) -> None:
    generator = random.Random(ending)
    num_ended_early = 0
    for share in (0.1, 0.6):
        before = journaled()
        process = subprocess.Popen([*COMMAND, "-j", "8"], stderr=subprocess.PIPE, text=True)
        target = max(before, int(share * NUM_DOCUMENTS) + generator.randrange(10))
        while process.poll() is None and journaled() < target:
            time.sleep(0.001)
        time.sleep(generator.random() * 0.005)
        process.send_signal(ending)
        _, stderr = process.communicate(timeout=30)
        num_ended_early += process.returncode != 0
        assert process.returncode in (0, 130, -ending), stderr
        assert journaled() >= before
        if ending != signal.SIGKILL:
            assert not list(Path("out").rglob("*.part"))
        for path, text in outputs().items():
            assert text.startswith("# "), path
            assert text.endswith("\n"), path
    assert num_ended_early >= 1
    assert subprocess.run(COMMAND, timeout=60).returncode == 0
    assert outputs() == {
        f"out/{i % 7}/{i:03}.txt.md": f"# {i % 7}/{i:03}.txt\n\nPAUSE {i - (i % 3 == 2)}\n"
        for i in range(NUM_DOCUMENTS)
    }
    assert not list(Path("out").rglob("*.part"))
