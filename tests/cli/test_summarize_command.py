"""`mmserve summarize` over real files, with an engine that answers by script."""

import json
import subprocess
import sys
from pathlib import Path

import cli_engine
import pytest
from cli_engine import ANSWER, INVOICE, ScriptedEngine
from reportlab.pdfgen import canvas
from typer.testing import CliRunner, Result

from mmserve import cli
from mmserve.commands.tasks import describe
from mmserve.pipelines.events import Event, PageRead, PageReport, RequestSubmitted, TextAdded

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """The engines that were started."""
    return cli_engine.install(monkeypatch.setattr)


def summarize(*arguments: str, input: bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["summarize", *arguments], input=input, prog_name="mmserve")


def test_a_summary_cites_its_page(engines: list[ScriptedEngine]) -> None:
    Path("invoice.txt").write_text(INVOICE)
    result = summarize("invoice.txt", "-q")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("# invoice.txt\n")
    assert f"{ANSWER} [p. 1]" in result.stdout
    assert "Kestrel Instrument Works" in engines[0].prompts[0]


def test_options_reach_the_task_and_the_engine(engines: list[ScriptedEngine]) -> None:
    Path("pages.txt").write_text(f"First page about nothing.\f{INVOICE}\fThird page about a lighthouse.")
    result = summarize(
        "pages.txt", "-f", "json", "--pages", "2-", "--prompt", "Amounts, please.", "--model", "some/model"
    )
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert [page["number"] for page in summary["pages"]] == [2, 3]
    assert summary["model"] == "some/model"
    assert "[p. 2]" in summary["text"]
    assert "Amounts, please." in engines[0].prompts[0]


def test_standard_input(engines: list[ScriptedEngine]) -> None:
    result = summarize("-", "-f", "json", "-q", input=INVOICE.encode())
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["name"] == "stdin"


def test_one_bad_document_among_five(engines: list[ScriptedEngine]) -> None:
    for name in ("a", "b", "c", "d"):
        Path(f"{name}.txt").write_text(f"{INVOICE} {name}")
    sample = (SAMPLES / "invoice.pdf").read_bytes()
    Path("cut.pdf").write_bytes(sample[: len(sample) // 2])
    result = summarize(".", "-o", "out", "--report", "errors.jsonl", "-q")
    assert result.exit_code == 1
    written = sorted(path.name for path in Path("out").glob("*.md"))
    assert written == ["a.txt.md", "b.txt.md", "c.txt.md", "d.txt.md"]
    line = json.loads(Path("errors.jsonl").read_text())
    assert (line["path"], line["code"]) == ("cut.pdf", "corrupt_document")
    assert result.stderr.count("cut.pdf") == 1


def test_a_sample_is_read_and_summarised(engines: list[ScriptedEngine]) -> None:
    result = summarize(str(SAMPLES / "invoice.pdf"), "-f", "json", "-q")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["pages"][0]["source"] == "text_layer"
    assert "Kestrel" in engines[0].prompts[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pages", "one"], "'one' is no list of pages"),
        (["--pages", "4-1"], "backwards"),
        (["--length", "huge"], "'huge'"),
        (["--dpi", "5"], "dpi"),
        (["--max-file-bytes", "many"], "'many' is not a size"),
    ],
)
def test_usage_errors_come_before_the_engine(
    engines: list[ScriptedEngine], arguments: list[str], sentence: str
) -> None:
    Path("a.txt").write_text(INVOICE)
    result = summarize("a.txt", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert engines == []


def test_pages_that_one_document_does_not_have(engines: list[ScriptedEngine]) -> None:
    Path("short.txt").write_text(INVOICE)
    Path("long.txt").write_text(f"{INVOICE}\f{INVOICE} Second.")
    result = summarize("short.txt", "long.txt", "--pages", "2", "-q")
    assert result.exit_code == 1
    assert "short.txt: there is no page 2: the document has 1 page (invalid_request)" in result.stderr
    assert result.stdout.startswith("# long.txt\n")


def peak_bytes(num_documents: int) -> int:
    """Most resident memory of a run over a folder of one-page PDFs, all different."""
    folder = Path(f"in-{num_documents}")
    folder.mkdir()
    for i in range(num_documents):
        page = canvas.Canvas(str(folder / f"{i}.pdf"))
        page.drawString(72, 720, f"{INVOICE} Copy {i}.")
        page.save()
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cli_engine
from mmserve import cli
cli_engine.install(setattr)
cli.app(["summarize", {str(folder)!r}, "-o", "out-{num_documents}", "-q"], standalone_mode=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(list(Path(f"out-{num_documents}").glob("*.pdf.md"))) == num_documents
    return int(done.stdout) * 1024


def test_a_large_folder_needs_no_more_memory_than_a_small_one() -> None:
    few, many = peak_bytes(10), peak_bytes(400)
    assert many - few < 16 * 2**20, (few, many)


def test_progress_says_what_is_done() -> None:
    report = PageReport(3, "text_layer", is_blank=False)
    events: list[Event] = [
        PageRead(report, num_read=3, num_pages=12),
        RequestSubmitted("whole", 0, 1, 12),
        TextAdded("x"),
    ]
    steps = [describe(event.kind, event.to_dict(), "summarising") for event in events]
    assert steps == ["page 3 of 12", "summarising", None]
