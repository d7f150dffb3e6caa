"""Figures of a run, from times that are easy to reckon with."""

import dataclasses
import json

import pytest

from mmserve.bench.report import Measurement, Report, RequestRecord, compare, make_report, median_round


def measurement(*records: RequestRecord) -> Measurement:
    return Measurement(records=records, peak_memory_bytes=12345, device="cpu", dtype="bfloat16", threads=2)


def report_of_speed(speed: float) -> Report:
    record = RequestRecord(0.0, 0.5, 1.0, num_prompt_tokens=7, num_output_tokens=round(speed))
    return make_report(measurement(record), workload="C1", model="m")


def test_figures_of_two_requests() -> None:
    first = RequestRecord(10.0, 10.5, 12.5, num_prompt_tokens=100, num_output_tokens=21)
    second = RequestRecord(10.0, 11.5, 14.0, num_prompt_tokens=300, num_output_tokens=11)
    report = make_report(measurement(first, second), workload="C1", model="some-model")
    assert report["requests_per_second"] == pytest.approx(2 / 4)
    assert report["output_tokens_per_second"] == pytest.approx(32 / 4)
    assert report["total_tokens_per_second"] == pytest.approx(432 / 4)
    assert report["ttft_ms"] == {"p50": pytest.approx(1000), "p99": pytest.approx(1490)}
    assert report["tpot_ms"] == {"p50": pytest.approx(175), "p99": pytest.approx(248.5)}
    assert (report["peak_memory_bytes"], report["workload"], report["model"]) == (12345, "C1", "some-model")
    assert (report["device"], report["dtype"], report["threads"]) == ("cpu", "bfloat16", 2)


def test_a_report_has_these_keys_and_is_json() -> None:
    report = report_of_speed(10)
    assert set(json.loads(json.dumps(report))) == {
        *("requests_per_second", "output_tokens_per_second", "total_tokens_per_second", "ttft_ms", "tpot_ms"),
        *("peak_memory_bytes", "workload", "model", "device", "dtype", "threads", "versions"),
    }
    assert {"mmserve", "python", "torch", "transformers"} <= set(report["versions"])


def test_the_start_is_told_where_it_was_measured() -> None:
    record = RequestRecord(0.0, 0.5, 1.0, num_prompt_tokens=7, num_output_tokens=2)
    measured = dataclasses.replace(measurement(record), start_seconds=1.23456)
    assert make_report(measured, workload="C1", model="m")["start_seconds"] == 1.235


def test_the_first_request_counts_in_no_other_figure() -> None:
    first, record = (RequestRecord(0.0, t, 9.0, num_prompt_tokens=7, num_output_tokens=2) for t in (2.5, 0.5))
    report = make_report(dataclasses.replace(measurement(record), first=first), workload="T1-single", model="m")
    assert report["first_request_ttft_ms"] == 2500
    assert report["ttft_ms"]["p50"] == 500
    assert "first_request_ttft_ms" not in make_report(measurement(record), workload="T1", model="m")


def test_an_answer_of_one_token_has_no_gaps() -> None:
    assert RequestRecord(0.0, 1.0, 1.0, num_prompt_tokens=5, num_output_tokens=1).time_per_output_token == 0.0


def test_the_median_round() -> None:
    reports = [report_of_speed(speed) for speed in (30, 10, 20, 40)]
    assert median_round(reports[:3])["output_tokens_per_second"] == 20
    assert median_round(reports)["output_tokens_per_second"] == 20
    assert median_round(reports[:1]) is reports[0]


def test_a_comparison_takes_the_ratio_of_neighbours() -> None:
    ours = [report_of_speed(speed) for speed in (100, 30, 90)]
    theirs = [report_of_speed(speed) for speed in (50, 10, 60)]
    comparison = compare(ours, theirs, name="other")
    assert comparison["ratio"] == 2.0
    assert [pair["ratio"] for pair in comparison["rounds"]] == [2.0, 3.0, 1.5]
    assert comparison["rounds"][1] == {"mmserve": 30.0, "other": 10.0, "ratio": 3.0}
    assert comparison["mmserve"] is ours[2]
    assert comparison["other"] is theirs[0]
