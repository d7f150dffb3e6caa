import difflib
import sys
from pathlib import Path

import numpy as np
import pytest
from document_makers import PROSE, picture_of
from PIL import Image

from mmserve.errors import SetupError
from mmserve.vision import ocr
from mmserve.vision.ocr import OcrEngine, TesseractEngine, choose_engine
from mmserve.vision.reading_order import text_of

PAGE = picture_of(PROSE, size=(1100, 420))


@pytest.fixture(scope="module")
def tesseract() -> OcrEngine:
    return TesseractEngine(timeout=60)


@pytest.fixture(params=["rapidocr", "tesseract"])
def engine(request: pytest.FixtureRequest, ocr_engine: OcrEngine, tesseract: OcrEngine) -> OcrEngine:
    return ocr_engine if request.param == "rapidocr" else tesseract


def likeness(engine: OcrEngine, picture: Image.Image, lines: tuple[str, ...] = PROSE) -> float:
    text = text_of(engine.read(np.asarray(picture)).lines)
    return difflib.SequenceMatcher(None, "\n".join(lines), text, autojunk=False).ratio()


def test_lines_come_in_reading_order(engine: OcrEngine) -> None:
    assert likeness(engine, PAGE) > 0.98


@pytest.mark.parametrize("angle", [1.5, -1.5])
def test_a_slightly_turned_scan_reads_well(engine: OcrEngine, angle: float) -> None:
    noisy = Image.blend(PAGE, Image.effect_noise(PAGE.size, 60).convert("RGB"), 0.15)
    turned = noisy.rotate(angle, resample=Image.Resampling.BICUBIC, expand=True, fillcolor="white")
    assert likeness(engine, turned) > 0.95


def test_a_page_on_its_head_is_turned(engine: OcrEngine) -> None:
    assert likeness(engine, PAGE.rotate(180)) > 0.95


@pytest.mark.parametrize("angle", [90, 270])
def test_a_page_on_its_side_is_turned(engine: OcrEngine, angle: int) -> None:
    result = engine.read(np.asarray(PAGE.rotate(angle, expand=True)))
    assert result.quarter_turns == {90: 3, 270: 1}[angle]
    assert "4,210 pounds" in text_of(result.lines)


def test_lines_stand_where_they_are_in_the_picture(engine: OcrEngine) -> None:
    lines = engine.read(np.asarray(PAGE)).lines
    first = min(lines, key=lambda line: line.top)
    assert 25 <= first.left <= 60
    assert 25 <= first.top <= 60
    assert first.right > 700


def test_what_stands_side_by_side_is_one_line(ocr_engine: OcrEngine) -> None:
    lines = ("Coffee beans", "Oat milk", "Total")
    prices = ("12.50", "3.20", "15.70")
    receipt = picture_of(lines, size=(700, 240), font_size=30)
    receipt.paste(picture_of(prices, size=(200, 240), font_size=30), (460, 0))
    turned = receipt.rotate(2, resample=Image.Resampling.BICUBIC, expand=True, fillcolor="white")
    text = text_of(ocr_engine.read(np.asarray(turned)).lines)
    assert [line.split("  ") for line in text.splitlines()] == [list(row) for row in zip(lines, prices, strict=True)]


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (2000, 8), (26, 28)])
def test_tiny_pictures_are_no_trouble(engine: OcrEngine, size: tuple[int, int]) -> None:
    assert engine.read(np.asarray(Image.new("RGB", size, "white"))).lines == ()


def test_a_picture_without_text_gives_no_lines(engine: OcrEngine) -> None:
    gradient = Image.radial_gradient("L").resize((600, 400)).convert("RGB")
    assert engine.read(np.asarray(gradient)).lines == ()


def test_one_line_is_read_without_looking_for_it(engine: OcrEngine) -> None:
    line = picture_of(["Receipt number 58112"], size=(420, 110)).crop((30, 36, 400, 76))
    assert "58112" in engine.read_line(np.asarray(line))


def test_rapidocr_is_the_default_and_tesseract_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("auto") == "rapidocr"
    assert choose_engine("off") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_engine("auto") == "tesseract"
    with pytest.raises(SetupError, match="pip install rapidocr"):
        choose_engine("rapidocr")
    monkeypatch.setenv("PATH", "")
    assert choose_engine("auto") is None
    with pytest.raises(SetupError, match="apt install tesseract-ocr"):
        choose_engine("tesseract")


def test_models_come_with_the_wheel_and_are_never_downloaded(ocr_engine: OcrEngine) -> None:
    """The paths are given outright, so that the downloading code of RapidOCR is not reached."""
    models = Path(sys.modules["rapidocr"].__file__ or "").parent / "models"
    assert Path(ocr._model(models, "*_det_*.onnx")).is_file()
    assert Path(ocr._model(models, "*_rec_*.onnx")).is_file()
    with pytest.raises(SetupError, match="carries no models"):
        ocr._model(models / "elsewhere", "*_det_*.onnx")


def test_it_needs_no_graphical_libraries(ocr_engine: OcrEngine) -> None:
    maps = Path("/proc/self/maps").read_text()
    assert "cv2" in maps
    assert "libGL.so" not in maps


def test_it_does_not_print(ocr_engine: OcrEngine, capfd: pytest.CaptureFixture[str]) -> None:
    ocr_engine.read(np.asarray(Image.new("RGB", (200, 100), "white")))
    assert capfd.readouterr() == ("", "")
