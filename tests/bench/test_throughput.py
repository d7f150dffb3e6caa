"""Rounds in turn, and the command around them."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference_models import save_reference_model
from typer.testing import CliRunner

from mmserve.bench import throughput
from mmserve.bench.limits import Ceilings, text_limit
from mmserve.bench.report import Measurement, RequestRecord
from mmserve.bench.throughput import run_throughput
from mmserve.bench.workloads import Workload, build_workload
from mmserve.cli import app
from mmserve.config import EngineConfig, ModelConfig
from mmserve.weights.shapes import SHAPES

BASELINE_PID = 77


class Stage:
    """Stands in for both engines and keeps what was asked of them; the speeds are those of the script."""

    def __init__(self, ours: list[int], theirs: list[int]) -> None:
        self.ours, self.theirs = iter(ours), iter(theirs)
        self.log: list[str] = []
        self.configs: list[EngineConfig] = []
        self.pid = BASELINE_PID

    def measure_engine(
        self, config: EngineConfig, workload: Workload, *, excluded_pids: Collection[int]
    ) -> Measurement:
        self.log.append(f"mmserve {workload.name} {len(workload.prompts)} without {list(excluded_pids)}")
        self.configs.append(config)
        return measurement(next(self.ours))

    def open_baseline(self, config: EngineConfig) -> "Stage":
        self.log.append(f"open {config.model}")
        return self

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("close")

    def measure(self, workload: Workload) -> Measurement:
        self.log.append(f"baseline {workload.name} {len(workload.prompts)}")
        return measurement(next(self.theirs))


def measurement(speed: int) -> Measurement:
    record = RequestRecord(0.0, 0.5, 1.0, num_prompt_tokens=10, num_output_tokens=speed)
    return Measurement(records=(record,), peak_memory_bytes=5, device="cpu", dtype="float32", threads=1)


def set_stage(monkeypatch: pytest.MonkeyPatch, ours: list[int], theirs: list[int] | None = None) -> Stage:
    stage = Stage(ours, theirs or [])
    monkeypatch.setattr(throughput, "measure_engine", stage.measure_engine)
    monkeypatch.setattr(throughput, "TransformersBaseline", stage.open_baseline)
    return stage


def test_rounds_alternate_between_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = set_stage(monkeypatch, [20, 40], [10, 10])
    config = EngineConfig(model="m")
    report = run_throughput(config, build_workload("C1", 2), rounds=2, baseline="transformers")
    round_log = [f"mmserve C1 2 without [{BASELINE_PID}]", "baseline C1 2"]
    assert stage.log == ["open m", *round_log, *round_log, "close"]
    assert report["ratio"] == 3.0
    assert [pair["ratio"] for pair in report["rounds"]] == [2.0, 4.0]


def test_without_a_baseline_the_report_is_that_of_the_median_round(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = set_stage(monkeypatch, [10, 30, 20])
    report = run_throughput(EngineConfig(), build_workload("C1", 1), rounds=3)
    assert report["output_tokens_per_second"] == 20
    assert stage.log == ["mmserve C1 1 without []"] * 3


def test_the_share_of_the_limit_follows_from_given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_hf(SHAPES["llama-2-7b"].config)
    work = build_workload("C1", 1)
    limit = text_limit(model, work, Ceilings(1e13, 1e11), num_bytes=4)
    measured = replace(measurement(10), model=model)
    monkeypatch.setattr(throughput, "measure_engine", lambda *_, **__: measured)
    report = run_throughput(EngineConfig(), work, ceilings=Ceilings(1e13, 1e11))
    assert report["limit_seconds"] == pytest.approx(limit.seconds, rel=1e-3)
    assert report["share_of_limit"] == pytest.approx(limit.seconds / measured.seconds, rel=1e-3)


def test_ceilings_of_a_gpu_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def measure(device: str) -> Ceilings:
        devices.append(device)
        return Ceilings(1e13, 1e11)

    model = ModelConfig.from_hf(SHAPES["llama-2-7b"].config)
    monkeypatch.setattr(throughput, "measure_ceilings", measure)
    for device in ("cpu", "cuda:0"):
        measured = replace(measurement(10), model=model, device=device)
        monkeypatch.setattr(throughput, "measure_engine", lambda *_, found=measured, **__: found)
        report = run_throughput(EngineConfig(), build_workload("C1", 1))
        assert ("share_of_limit" in report) == (device == "cuda:0")
    assert devices == ["cuda:0"]


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "throughput", *arguments])


def test_the_command_prints_one_json_object_and_writes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = set_stage(monkeypatch, [10])
    output = tmp_path / "figures.json"
    options = ["--workload", "T3", "--num-prompts", "3", "--num-threads", "2", "--max-num-seqs", "8"]
    result = run_command(*options, "--model", "some-model", "--dtype", "float32", "--output", str(output))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["workload"] == "T3"
    assert json.loads(output.read_text()) == json.loads(result.stdout)
    assert result.stderr == ""
    assert stage.log == ["mmserve T3 3 without []"]
    (config,) = stage.configs
    assert (config.model, config.dtype, config.num_threads, config.scheduler.max_num_seqs) == (
        *("some-model", "float32"),
        *(2, 8),
    )


def test_the_command_compares_with_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stage(monkeypatch, [30, 30, 30], [10, 10, 10])
    result = run_command("--baseline", "transformers", "--rounds", "3", "--num-prompts", "1")
    comparison = json.loads(result.stdout)
    assert set(comparison) == {"mmserve", "transformers", "ratio", "rounds"}
    assert comparison["ratio"] == 3.0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "C9"],
        ["--baseline", "llama.cpp"],
        ["--rounds", "0"],
        ["--num-prompts", "0"],
        ["--output", "/no/such/folder/figures.json"],
        ["--max-num-seqs", "0"],
        ["--ceilings", "fast"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_2_before_anything_runs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = set_stage(monkeypatch, [10])
    result = run_command(*arguments)
    assert (result.exit_code, result.stdout, stage.log) == (2, "", [])
    assert result.stderr


def test_help_names_the_workloads() -> None:
    result = run_command("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("C1", "single", "T1", "T1-single", "T3", "T4"))


def test_a_real_engine_beside_transformers(tmp_path: Path) -> None:
    model = save_reference_model("llama", tmp_path / "model", vocab_size=40000, num_hidden_layers=1)
    options = ["--num-prompts", "2", "--num-threads", "1", "--kv-cache-memory-bytes", "16MiB", "--engine-process"]
    result = run_command("--model", str(model), *options, "--baseline", "transformers")
    assert result.exit_code == 0, result.stderr
    comparison = json.loads(result.stdout)
    for name in ("mmserve", "transformers"):
        assert comparison[name]["output_tokens_per_second"] > 0
        assert comparison[name]["ttft_ms"]["p50"] <= comparison[name]["ttft_ms"]["p99"]
    assert comparison["rounds"][0]["ratio"] == comparison["ratio"] > 0
