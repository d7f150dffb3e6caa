"""`mmserve extract` over real files, with an engine that answers by script."""

import json
from pathlib import Path

import cli_engine
import pytest
from cli_engine import INVOICE, ScriptedEngine
from typer.testing import CliRunner, Result

from mmserve import cli

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

SCHEMA = '{"type": "object", "properties": {"due": {"type": ["string", "null"]}}, "required": ["due"]}'


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """The engines that were started."""
    monkeypatch.setattr(cli_engine, "ANSWER", json.dumps({"due": "3 May 2025"}))
    return cli_engine.install(monkeypatch.setattr)


def extract(*arguments: str) -> Result:
    Path("invoice.txt").write_text(INVOICE)
    return CliRunner().invoke(cli.app, ["extract", *arguments], prog_name="mmserve")


def test_values_come_as_json_with_their_pages(engines: list[ScriptedEngine]) -> None:
    result = extract("invoice.txt", "--fields", "due", "-q")
    assert result.exit_code == 0, result.stderr
    extraction = json.loads(result.stdout)
    assert extraction["data"] == {"due": "3 May 2025"}
    assert extraction["values"] == [{"path": "/due", "value": "3 May 2025", "pages": [1], "verified": True}]


def test_a_schema_is_a_file_or_json(engines: list[ScriptedEngine]) -> None:
    Path("due.json").write_text(SCHEMA)
    for schema in ("due.json", SCHEMA):
        result = extract("invoice.txt", "--schema", schema, "-q", "-f", "md")
        assert result.exit_code == 0, result.stderr
        assert "| due | 3 May 2025 | 1 |" in result.stdout
    assert [json.loads(SCHEMA)["required"][0] in engine.prompts[0] for engine in engines] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "either schema or fields"),
        (["--fields", "a", "--schema", SCHEMA], "either schema or fields"),
        (["--fields", "a,,b"], "names with commas"),
        (["--schema", "missing.json"], "neither a JSON object nor a file"),
        (["--schema", "."], "neither a JSON object nor a file"),
        (["--schema", '{"type": 5}'], "no JSON Schema"),
    ],
)
def test_what_cannot_be_extracted_is_wrong_usage(
    arguments: list[str], reason: str, engines: list[ScriptedEngine]
) -> None:
    result = extract("invoice.txt", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not engines


def test_other_fields_are_another_result(engines: list[ScriptedEngine]) -> None:
    for fields in ("due", "due", "due,total"):
        assert extract("invoice.txt", "--fields", fields, "-o", "out", "--resume", "-q").exit_code == 0
    assert len(engines) == 2
    assert json.loads(Path("out/invoice.txt.json").read_text())["object"] == "extraction"
