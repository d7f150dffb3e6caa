"""`mmserve ask` over real files, with an engine that answers by script."""

import json
from pathlib import Path

import cli_engine
import pytest
from cli_engine import ANSWER, INVOICE, ScriptedEngine
from typer.testing import CliRunner, Result

from mmserve import cli

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

QUESTION = "When is the amount due?"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """The engines that were started."""
    return cli_engine.install(monkeypatch.setattr)


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["ask", *arguments], prog_name="mmserve")


def test_an_answer_cites_its_page(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    result = ask(QUESTION, "invoice.txt", "-q")
    assert result.exit_code == 0, result.stderr
    assert f"**{QUESTION}**\n\n{ANSWER} [p. 1]" in result.stdout
    assert f"Question: {QUESTION}" in engines[0].prompts[0]


def test_each_document_answers_for_itself(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    Path("poem.txt").write_text("The sea is wide and it is deep, and nobody has seen all of it.")
    result = ask(QUESTION, "invoice.txt", "poem.txt", "-f", "json", "-q", "-o", "out", "-j", "1")
    assert result.exit_code == 0, result.stderr
    found = {name: json.loads(Path(f"out/{name}.txt.json").read_text())["found"] for name in ("invoice", "poem")}
    assert found == {"invoice": True, "poem": False}


def test_another_question_is_another_result(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    for question in (QUESTION, QUESTION, "Who?"):
        assert ask(question, "invoice.txt", "-q", "-o", "out", "--resume").exit_code == 0
    assert len(engines) == 2


def test_a_question_that_stands_last_is_told_to_come_first(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    result = ask("invoice.txt", QUESTION)
    assert result.exit_code == 2
    assert "the question comes first: mmserve ask QUESTION invoice.txt" in result.stderr
    assert not engines


def test_an_empty_question_is_wrong_usage(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    result = ask(" ", "invoice.txt")
    assert result.exit_code == 2
    assert "question" in result.stderr
