"""Commands with a tiny random model that sees."""

import json
from pathlib import Path

import pytest
from reportlab.pdfgen import canvas
from typer.testing import CliRunner, Result
from vision_checkpoint import picture_bytes, save_vision_model

from mmserve import cli
from mmserve.commands.options import EngineOptions, VisionOptions
from mmserve.errors import RequestError
from mmserve.vision.image_source import PixelLimits

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


def run(command: str, model: Path, *arguments: str) -> Result:
    engine = ["--model", str(model), "--num-threads", "1", "--kv-cache-memory-bytes", "8MiB"]
    vision = ["--num-preprocess-workers", "1", "--max-pixels", "30000", "--encoder-cache-tokens", "512"]
    return CliRunner().invoke(cli.app, [command, *arguments, *engine, *vision], prog_name="mmserve")


def write_pdf(*pages: str) -> None:
    page = canvas.Canvas("a.pdf", pagesize=(300, 200))
    for text in pages:
        page.drawString(20, 100, text)
        page.showPage()
    page.save()


def test_a_summary_by_pictures(model: Path) -> None:
    write_pdf("The rent of the workshop is due in May.", "Three kilns may be connected.")
    result = run("summarize", model, "a.pdf", "--mode", "vision", "-f", "json", "-q", "--max-tokens", "16")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["num_pages"] == 2
    assert summary["usage"]["prompt_tokens"] > 2 * 20


def test_pages_are_written_down_from_their_pictures_and_blank_ones_are_not_shown(model: Path) -> None:
    write_pdf("The rent of the workshop is due in May.", "", "Three kilns may be connected.")
    result = run("transcribe", model, "a.pdf", "--mode", "vision", "-f", "json", "-q", "--max-tokens", "8")
    assert result.exit_code == 0, result.stderr
    transcript = json.loads(result.stdout)
    assert [page["source"] for page in transcript["pages"]] == ["vision", "none", "vision"]
    assert [page["is_blank"] for page in transcript["pages"]] == [False, True, False]
    assert 0 < transcript["usage"]["completion_tokens"] <= 16
    in_auto = json.loads(run("transcribe", model, "a.pdf", "-f", "json", "-q").stdout)
    assert [page["markdown"] for page in in_auto["pages"]][::2] == [
        "The rent of the workshop is due in May.",
        "Three kilns may be connected.",
    ]
    assert in_auto["usage"]["total_tokens"] == 0


def test_a_question_about_a_picture(model: Path) -> None:
    Path("one.png").write_bytes(picture_bytes(1))
    Path("two.png").write_bytes(picture_bytes(2))
    answers = [
        run("chat", model, "What is it?", "-i", name, "-q", "--temperature", "0", "--max-tokens", "12")
        for name in ("one.png", "two.png", "one.png")
    ]
    assert all(answer.exit_code == 0 for answer in answers), answers[0].stderr
    assert answers[0].stdout == answers[2].stdout != answers[1].stdout


def test_a_text_or_a_missing_file_is_no_picture(model: Path) -> None:
    Path("notes.txt").write_text("hello")
    assert "pipe it in" in run("chat", model, "What is it?", "-i", "notes.txt", "-q").stderr
    assert "missing.png" in run("chat", model, "What is it?", "-i", "missing.png", "-q").stderr


def test_options_become_limits_and_configuration() -> None:
    assert VisionOptions(max_pixels=900, min_pixels=100).to_limits() == PixelLimits(100, 900)
    with pytest.raises(RequestError, match="min-pixels"):
        VisionOptions(max_pixels=100, min_pixels=900).to_limits()
    scheduler = EngineOptions(max_encoder_tokens=11, encoder_cache_tokens=22).to_config().scheduler
    assert (scheduler.max_encoder_tokens, scheduler.encoder_cache_tokens) == (11, 22)
