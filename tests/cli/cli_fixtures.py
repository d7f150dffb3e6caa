"""The command line in this process, and as a process of its own, with a command that needs no model."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import cli_fakes
import pytest
from cli_fakes import Invoke
from typer.testing import CliRunner, Result

from mmserve import cli


@pytest.fixture
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory and home, and none of the user's settings."""
    home = tmp_path / "home"
    place = tmp_path / "place"
    home.mkdir()
    place.mkdir()
    for name in [name for name in os.environ if name.startswith("MMSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(place)


@pytest.fixture
def invoke(empty_place: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """`invoke("shout", "a.txt")` -> exit code, standard output and standard error."""
    cli_fakes.install(monkeypatch.setattr)
    runner = CliRunner()

    def run(*arguments: str, input: bytes | str | None = None) -> Result:
        return runner.invoke(cli.app, list(arguments), input=input, prog_name="mmserve")

    yield run
    sys.modules.pop("mmserve.commands.shout", None)
