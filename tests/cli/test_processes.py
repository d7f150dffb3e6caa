"""What only a process of its own can show: signals, closed pipes, exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import cli_fakes
import pytest

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

COMMAND = [sys.executable, cli_fakes.__file__, "shout", "--model", "some/model"]


def start(*arguments: str, **options: int) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*COMMAND, *arguments], text=True, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_with_130_and_keeps_what_was_done(ending: signal.Signals) -> None:
    Path("in").mkdir()
    Path("in/a.txt").write_text("one")
    Path("in/b.txt").write_text("slow")
    process = start("in", "-o", "out", "-j", "1", "-f", "json")
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(ending)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stderr == "Interrupted. Done: 1, 0 failed.\n"
    assert [item["text"] for item in json.loads(stdout)] == ["ONE"]
    assert json.loads(Path("out/a.txt.json").read_text())["text"] == "ONE"
    assert sorted(path.name for path in Path("out").iterdir()) == [".mmserve-done.jsonl", "a.txt.json"]


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    Path("in").mkdir()
    for i in range(50):
        Path(f"in/{i:02}.txt").write_text(f"text {i} " * 5000)
    process = start("in", "-j", "1")
    assert process.stdout is not None
    assert process.stdout.readline() == "# 00.txt\n"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(timeout=10) == 141


def test_a_terminal_is_not_a_document() -> None:
    terminal, standard_input = pty.openpty()
    process = start("-", stdin=standard_input)
    _, stderr = process.communicate(timeout=10)
    os.close(terminal)
    os.close(standard_input)
    assert process.returncode == 2
    assert stderr == "mmserve: - reads a document from standard input: pipe one in\n"


def test_a_full_disk_ends_the_run_with_a_sentence() -> None:
    Path("in").mkdir()
    for name in ("a", "b", "c"):
        Path(f"in/{name}.txt").write_text(name)
    with open("/dev/full", "w") as full:
        process = start("in", "-j", "1", stdout=full.fileno())
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == 1
    assert stderr == "mmserve: No space left on device\n"


def test_an_engine_that_still_loads_does_not_spoil_the_end() -> None:
    """At the interpreter's own end, torch in a thread that goes on would abort the process."""
    script = (
        "import atexit, sys, threading, time\n"
        "from mmserve import cli\n"
        "threading.Thread(target=time.sleep, args=(60,), name=cli.ENGINE_THREAD, daemon=True).start()\n"
        "atexit.register(print, 'the interpreter ends')\n"
        "sys.argv = ['mmserve', *sys.argv[1:]]\n"
        "cli.main()\n"
    )
    for arguments, code in ((["--version"], 0), (["no-such-command"], 2)):
        ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=30)
        assert ended.returncode == code
        assert "the interpreter ends" not in ended.stdout
        assert (ended.stdout + ended.stderr).strip()
