"""`mmserve transcribe` over the samples, with pages read for real and an engine that answers by script."""

import json
from pathlib import Path

import cli_engine
import pytest
from cli_engine import ScriptedEngine
from typer.testing import CliRunner, Result

from mmserve import cli

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    return cli_engine.install(monkeypatch.setattr)


def transcribe(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["transcribe", *arguments], prog_name="mmserve")


def test_samples_become_markdown_and_no_model_is_asked(engines: list[ScriptedEngine]) -> None:
    names = ("soil-table.pdf", "invoice.pdf", "receipt.png", "lift-repair.tiff")
    result = transcribe(*(str(SAMPLES / name) for name in names), "-o", "out", "-q")
    assert result.exit_code == 0, result.stderr
    soil, invoice, receipt, lift = (Path("out", f"{name}.md").read_text() for name in names)
    assert "| Mill Field | 8.9 | Sandy loam | 5.8 | 17 | 96 | 51 | 2.6% | 4.5 |" in soil
    assert "# Kestrel Instrument Works Ltd\n\nUnit 6, Millrace Yard" in invoice
    assert "| Invoice number | 2025-0417 |" in invoice
    assert "| CB-15 | Armoured sensor cable, 15 m | 8 | £37.25 | £298.00 |" in invoice
    assert "|  |  |  | Total due | £4,933.20 |" in invoice
    assert "| Paint brush 50 mm | 6.20 |" in receipt
    assert lift.index("<!-- page 1 -->") < lift.index("R-5530") < lift.index("<!-- page 2 -->")
    assert lift.index("<!-- page 2 -->") < lift.index("| Door lock switch | DLS-44 | 1 | £118.00 |")
    assert lift.index("<!-- page 3 -->") < lift.index("£407.00 will be paid within 14 days.")
    assert engines[0].prompts == []


def test_json_has_each_page_with_its_source(engines: list[ScriptedEngine]) -> None:
    result = transcribe(str(SAMPLES / "lease-mixed.pdf"), "--pages", "2-3", "-f", "json", "-q")
    assert result.exit_code == 0, result.stderr
    transcript = json.loads(result.stdout)
    assert [(page["number"], page["source"]) for page in transcript["pages"]] == [(2, "text_layer"), (3, "ocr")]
    assert "serviced on 11 July 2024. Meter reading 48210." in transcript["pages"][1]["markdown"]


def test_mode_vision_needs_a_model_that_sees(engines: list[ScriptedEngine]) -> None:
    result = transcribe(str(SAMPLES / "receipt.png"), "--mode", "vision", "-q")
    assert result.exit_code == 1
    assert "images_not_supported" in result.stderr


def test_plain_text_is_escaped_and_keeps_its_lines(engines: list[ScriptedEngine]) -> None:
    Path("notes.txt").write_text("# not a heading\nsecond line\f<!-- page 9 -->")
    result = transcribe("notes.txt", "-q")
    assert result.stdout.endswith(
        "<!-- page 1 -->\n\n\\# not a heading  \nsecond line\n\n<!-- page 2 -->\n\n\\<!-- page 9 -->\n"
    )
