"""Pictures of text -> lines with places. RapidOCR brings its own models; Tesseract is used where its binary is."""

import importlib.util
import logging
import os
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmserve.errors import SetupError
from mmserve.vision.image import RGB
from mmserve.vision.page_types import OcrName
from mmserve.vision.reading_order import Line, are_mostly_upright_strips

# the detector's input; finds 5 pt print on A4. Peak of a process on one A4 page at 200 dpi: 340 MB, at 1280 380 MB
_DETECTOR_SIDE = 1120
_MAX_SIDE = 2600
_MIN_SIDE = 48
_SURE = 0.85
_UPRIGHT_ENOUGH = 0.80
_MAX_TESSERACT_LANGUAGES = 4


@dataclass(frozen=True)
class OcrText:
    """Lines in pixels of the picture that was given, and how sure the reader is of them (0 to 1).

    A picture that stood on its side or head was turned by `quarter_turns` (counter-clockwise) first, and the places
    are those in the turned picture.
    """

    lines: tuple[Line, ...] = ()
    confidence: float = 0.0
    quarter_turns: int = 0


class OcrEngine(Protocol):
    def read(self, pixels: RGB) -> OcrText:
        """Find and read all lines of RGB `pixels` [height, width, 3]."""
        ...

    def read_line(self, pixels: RGB) -> str:
        """Read a picture of one line."""
        ...


def choose_engine(name: OcrName) -> Literal["rapidocr", "tesseract"] | None:
    """The engine that `name` means on this machine, None for no OCR (`auto` may find none).

    Raises `SetupError` (`missing_dependency`) where an engine was asked for by name and is not here.
    """
    has_rapidocr = all(importlib.util.find_spec(module) for module in ("rapidocr", "onnxruntime"))
    has_tesseract = shutil.which("tesseract") is not None
    if name == "rapidocr" and not has_rapidocr:
        raise SetupError("missing_dependency", "RapidOCR is not installed: pip install rapidocr onnxruntime")
    if name == "tesseract" and not has_tesseract:
        raise SetupError(
            "missing_dependency", "the tesseract program is not installed: apt install tesseract-ocr (or brew, dnf)"
        )
    if name == "auto":
        return "rapidocr" if has_rapidocr else "tesseract" if has_tesseract else None
    return None if name == "off" else name


def load_engine(name: Literal["rapidocr", "tesseract"], *, num_threads: int, timeout: float) -> OcrEngine:
    return RapidOcrEngine(num_threads) if name == "rapidocr" else TesseractEngine(timeout)


class RapidOcrEngine:
    """PP-OCR by onnxruntime on the CPU."""

    def __init__(self, num_threads: int) -> None:
        import cv2
        import rapidocr

        cv2.setNumThreads(num_threads)
        models = Path(rapidocr.__file__).parent / "models"
        self._engine: Any = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.max_side_len": _MAX_SIDE,
                # paths given outright: nothing is ever downloaded
                "Det.model_path": _model(models, "*_det_*.onnx"),
                "Rec.model_path": _model(models, "*_rec_*.onnx"),
                "Det.limit_type": "max",
                "Det.limit_side_len": _DETECTOR_SIDE,
                # one line at a time: no padding to the longest, a fifth of the memory
                "Rec.rec_batch_num": 1,
                "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "EngineConfig.onnxruntime.enable_cpu_mem_arena": False,
            }
        )
        logging.getLogger("RapidOCR").disabled = True

    def read(self, pixels: RGB) -> OcrText:
        return _read_upright(self._read_as_it_is, pixels)

    def read_line(self, pixels: RGB) -> str:
        result = self._engine(_bgr(pixels), use_det=False, use_cls=False, use_rec=True)
        return " ".join(result.txts or ())

    def _read_as_it_is(self, pixels: RGB) -> OcrText:
        result = self._engine(_bgr(pixels), use_det=True, use_cls=False, use_rec=True)
        if getattr(result, "txts", None) is None or result.boxes is None:
            return OcrText()
        quads = np.asarray(result.boxes, dtype=np.float64)
        weights = [len(text) for text in result.txts]
        confidence = float(np.average(result.scores, weights=weights)) if sum(weights) else 0.0
        lines = _deskewed_lines(quads, result.txts)
        return OcrText(tuple(lines), confidence)


class TesseractEngine:
    """Tesseract with the languages that are installed, English first."""

    def __init__(self, timeout: float) -> None:
        import pytesseract

        os.environ["OMP_THREAD_LIMIT"] = "1"
        self._tesseract: Any = pytesseract
        self._timeout = timeout
        installed = pytesseract.get_languages()
        languages = sorted(set(installed) - {"osd", "equ", "snum"}, key=lambda language: (language != "eng", language))
        if not languages:
            raise SetupError("missing_dependency", "tesseract has no language: apt install tesseract-ocr-eng")
        self._languages = "+".join(languages[:_MAX_TESSERACT_LANGUAGES])

    def read(self, pixels: RGB) -> OcrText:
        return _read_upright(self._read_as_it_is, pixels)

    def _read_as_it_is(self, pixels: RGB) -> OcrText:
        words = self._words(pixels, "--psm 3")
        confidences = [float(word["conf"]) / 100 for group in words for word in group]
        confidence = statistics.fmean(confidences) if confidences else 0.0
        return OcrText(tuple(_line_of_words(group) for group in words), confidence)

    def read_line(self, pixels: RGB) -> str:
        padded = np.pad(pixels, ((8, 8), (8, 8), (0, 0)), mode="edge")
        return " ".join(_line_of_words(group).text for group in self._words(padded, "--psm 7"))

    def _words(self, pixels: RGB, config: str) -> list[list[dict[str, Any]]]:
        """Words that are more than noise, grouped by line."""
        data = self._tesseract.image_to_data(
            Image.fromarray(pixels),
            lang=self._languages,
            config=config,
            output_type=self._tesseract.Output.DICT,
            timeout=self._timeout,
        )
        groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for index, text in enumerate(data["text"]):
            word = {key: values[index] for key, values in data.items()}
            if text.strip() and float(word["conf"]) >= 30:
                groups.setdefault((word["block_num"], word["par_num"], word["line_num"]), []).append(word)
        return list(groups.values())


def _read_upright(read_as_it_is: Callable[[RGB], OcrText], pixels: RGB) -> OcrText:
    """Turns a page that lies on its side or stands on its head, which only the lines themselves tell."""
    pixels, scale = _bring_to_size(pixels)
    best = read_as_it_is(pixels)
    is_sideways = are_mostly_upright_strips(best.lines)
    is_unsure = bool(best.lines) and best.confidence < _UPRIGHT_ENOUGH
    for quarter_turns in (1, 3) if is_sideways else (2,) if is_unsure else ():
        turned = read_as_it_is(np.rot90(pixels, quarter_turns))
        is_better = turned.confidence > best.confidence or (is_sideways and best.quarter_turns == 0)
        if turned.lines and is_better and not are_mostly_upright_strips(turned.lines):
            best = replace(turned, quarter_turns=quarter_turns)
        if best.quarter_turns and best.confidence >= _SURE:
            break
    return replace(best, lines=tuple(_scaled(line, 1 / scale) for line in best.lines))


def _model(folder: Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SetupError("missing_dependency", "this RapidOCR carries no models: pip install 'rapidocr>=3.10'")
    return str(found[0])


def _bgr(pixels: RGB) -> RGB:
    return np.ascontiguousarray(pixels[:, :, ::-1])


def _bring_to_size(pixels: RGB) -> tuple[RGB, float]:
    """Neither larger than an engine takes well, nor smaller than its first layers; the factor that was applied."""
    height, width = pixels.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(height, width))
    if scale < 1.0:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX, reducing_gap=2.0))
    lacking = [max(0, _MIN_SIDE - side) for side in pixels.shape[:2]]
    if any(lacking):
        pixels = np.pad(pixels, ((0, lacking[0]), (0, lacking[1]), (0, 0)), mode="edge")
    return pixels, scale


def _scaled(line: Line, factor: float) -> Line:
    return Line(line.text, line.left * factor, line.top * factor, line.right * factor, line.bottom * factor)


def _deskewed_lines(quads: npt.NDArray[np.float64], texts: tuple[str, ...]) -> list[Line]:
    """Boxes as they would lie if the page were straight, so that what stands side by side shares its height."""
    along = quads[:, 1] - quads[:, 0]
    length = np.linalg.norm(along, axis=1)
    long_enough = length >= 0.5 * length.max()
    angle = float(np.median(np.arctan2(along[long_enough, 1], along[long_enough, 0])))
    if abs(angle) > 0.35:
        angle = 0.0
    cosine, sine = np.cos(-angle), np.sin(-angle)
    straight = quads @ np.array([[cosine, sine], [-sine, cosine]])
    low, high = straight.min(axis=1), straight.max(axis=1)
    return [
        Line(text, float(a[0]), float(a[1]), float(b[0]), float(b[1]))
        for text, a, b in zip(texts, low, high, strict=True)
    ]


def _line_of_words(words: list[dict[str, Any]]) -> Line:
    left, top = min(word["left"] for word in words), min(word["top"] for word in words)
    right = max(word["left"] + word["width"] for word in words)
    bottom = max(word["top"] + word["height"] for word in words)
    return Line(" ".join(word["text"] for word in words), left, top, right, bottom)
