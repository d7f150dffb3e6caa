"""The workloads of pages on a tiny random vision-language model, and the command around them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from reference_models import save_reference_model
from typer.testing import CliRunner
from vision_checkpoint import save_vision_model

from mmserve.bench.encoder import run_encoder
from mmserve.bench.image_memory import picture_order, shared_bytes
from mmserve.bench.vision import build_page_workload
from mmserve.cli import app
from mmserve.config import EngineConfig
from mmserve.errors import RequestError
from mmserve.request import PatchesRef
from mmserve.vision.patches import unlink


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "vision", "--num-preprocess-workers", "1", *arguments])


def report_of(model: Path, *arguments: str) -> dict[str, Any]:
    options = ["--model", str(model), "--num-threads", "1", "--kv-cache-memory-bytes", "2MiB", "--dtype", "float32"]
    result = run_command(*options, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def test_the_workloads() -> None:
    d1, d2 = build_page_workload("D1"), build_page_workload("D2")
    assert (list(d1.page_numbers), d1.max_tokens) == (list(range(96)), 128)
    assert (list(d2.page_numbers), d2.max_tokens) == (list(range(700, 716)), 64)
    assert d1.questions == ("Summarise this page in five sentences.",)
    assert d2.questions == ("What is the total?", "Who signed it?", "List the dates.", "Which language is it?")
    assert d1.page_size == d2.page_size == (1240, 1754)
    small = build_page_workload("D2", 2, 8)
    assert (list(small.page_numbers), small.max_tokens, small.questions) == ([700, 701], 8, d2.questions)
    with pytest.raises(RequestError, match="D1, D2"):
        build_page_workload("D9")


@pytest.mark.parametrize("engine", ["--engine-thread", "--engine-process"])
def test_four_questions_about_a_page_encode_it_once(model: Path, tmp_path: Path, engine: str) -> None:
    output = tmp_path / "figures.json"
    options = ["--workload", "D2", "--num-pages", "2", "--max-tokens", "3", engine, "--output", str(output)]
    report = report_of(model, *options)
    assert json.loads(output.read_text()) == report
    assert report["source"] == "pixels"
    assert (report["num_pages"], report["num_requests"], report["max_tokens"]) == (2, 8, 3)
    assert report["encoder_cache"] == {"queries": 8, "hits": 6}
    assert report["requests_per_second"] == pytest.approx(4 * report["pages_per_second"], rel=0.01)
    assert report["preprocess_seconds"] > 0
    assert report["encoder_seconds"] > 0
    assert report["peak_memory_bytes"] > 50 * 1024**2
    assert {"mmserve", "torch"} <= set(report["versions"])
    first, second = (report["same_page"]["ttft_ms"][name] for name in ("first_question", "second_question"))
    assert report["same_page"]["second_to_first"] > 0
    alone = report["page_alone"]
    assert (alone["num_pages"], alone["ttft_ms"]) == (3, first)
    assert second > 0
    assert 0 < alone["preprocess_ms"] < alone["ttft_ms"]
    assert 0 < alone["encoder_ms"] < alone["ttft_ms"]


@pytest.mark.parametrize("source", ["pixels", "png", "pdf"])
@pytest.mark.parametrize("place", ["worker", "device"])
def test_pages_in_every_form(model: Path, source: str, place: str) -> None:
    options = ["--num-pages", "2", "--max-tokens", "2", "--rounds", "1", "--source", source, "--pixels-on", place]
    report = report_of(model, *options, "--engine-process" if source == "pixels" else "--engine-thread")
    assert (report["source"], report["num_pages"], report["page_alone"]["num_pages"]) == (source, 2, 1)
    assert report["encoder_cache"] == {"queries": 2, "hits": 0}
    assert report["preprocess_seconds"] > 0


def test_dummy_weights_and_fewer_pixels(model: Path) -> None:
    options = ("--load-format", "dummy", "--num-pages", "1", "--max-tokens", "2")
    whole = report_of(model, *options)
    small = report_of(model, *options, "--max-pixels", "10000")
    assert whole["workload"] == small["workload"] == "D1"
    assert whole["encoder_cache"]["queries"] == 1
    assert small["same_page"]["prompt_tokens"] < whole["same_page"]["prompt_tokens"]
    assert "limit_seconds" not in whole


def test_the_share_of_the_limit_counts_the_tower_once_a_page(model: Path) -> None:
    options = ("--max-tokens", "2", "--ceilings", "1e12,1e11")
    two_pages = report_of(model, *options, "--num-pages", "2")
    four_questions = report_of(model, *options, "--workload", "D2", "--num-pages", "2")
    vision = [report["limit"]["vision_seconds"] for report in (two_pages, four_questions)]
    assert vision[0] == vision[1] > 0
    assert two_pages["limit"]["prompt_seconds"] < four_questions["limit"]["prompt_seconds"]
    for report in (two_pages, four_questions):
        measured = report["num_requests"] / report["requests_per_second"]
        assert report["share_of_limit"] == pytest.approx(report["limit_seconds"] / measured, rel=0.05, abs=1e-4)
        assert report["start_seconds"] > 0


def test_the_encoders_agree(model: Path) -> None:
    report = report_of(model, "--workload", "encoder", "--rounds", "2")
    assert report["relative_difference"] < 1e-4
    assert report["num_pages"] == 4
    ratios = [pair["transformers"] / pair["mmserve"] for pair in report["rounds"]]
    assert len(ratios) == 2
    assert min(ratios) - 0.2 <= report["ratio"] <= max(ratios) + 0.2


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_the_encoders_of_the_other_families_agree(family: str, tmp_path: Path) -> None:
    from reference_qwen_vl import save_qwen_vl

    config = EngineConfig(model=str(save_qwen_vl(family, tmp_path)), dtype="float32")
    report = run_encoder(config, num_pages=2, page_size=(200, 300))
    assert report["relative_difference"] < 1e-4
    assert math.isfinite(report["ratio"])


def test_host_memory_is_flat(model: Path) -> None:
    report = report_of(model, "--workload", "memory", "--num-pages", "100", "--kv-cache-memory-bytes", "512KiB")
    samples = report["samples"]
    first, last = samples[0], samples[-1]
    assert [sample["num_pictures"] for sample in samples] == list(range(10, 101, 10))
    assert report["num_requests"] == 125
    assert last["num_preprocessed"] >= 100
    # The other pictures that come again are found, in the prefix cache or in that of the encoder.
    assert 100 <= last["num_encoded"] < report["num_requests"]
    # A hundred pictures have twenty times as much.
    assert last["shared_bytes"] <= 5 * 1024**2
    assert report["shared_bytes_after_close"] == 0
    assert report["growth_bytes"] == last["private_bytes"] - first["private_bytes"] < 24 * 1024**2


def test_every_picture_comes_and_a_quarter_comes_again() -> None:
    order = list(picture_order(0, 40))
    assert set(order) == set(range(40))
    assert len(order) == 50
    assert set(picture_order(20, 40)) >= set(range(20, 40))


def test_segments_count_until_they_are_gone() -> None:
    import torch

    from mmserve.vision.patches import PixelPatches, share

    ref: PatchesRef = share(PixelPatches(torch.zeros(1000)))
    assert shared_bytes([ref.segment, "no-such-segment"]) == 4000
    unlink(ref)
    assert shared_bytes([ref.segment]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "C1"],
        ["--num-pages", "0"],
        ["--max-tokens", "0"],
        ["--rounds", "0"],
        ["--output", "/no/such/folder/figures.json"],
        ["--workload", "memory", "--num-pages", "9"],
        ["--min-pixels", "9", "--max-pixels", "8"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_2_before_anything_runs(arguments: list[str]) -> None:
    result = run_command("--model", "/no/such/model", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


@pytest.mark.parametrize(
    ("workload", "exit_code", "reason"),
    [("D1", 1, "a vision-language model"), ("memory", 1, "a vision-language model"), ("encoder", 2, "qwen2_5_vl")],
)
def test_a_text_model_is_refused(workload: str, exit_code: int, reason: str, tmp_path: Path) -> None:
    model = save_reference_model("llama", tmp_path / "model", num_hidden_layers=1)
    options = ("--model", str(model), "--kv-cache-memory-bytes", "8MiB", "--workload", workload, "--num-pages", "10")
    result = run_command(*options)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert reason in result.stderr
