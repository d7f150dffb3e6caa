"""The program that memcheck watches: it has a case for every kernel, and its cases find faults."""

import re
from pathlib import Path

import memcheck
import pytest
import torch

from mmserve import kernels


def test_every_kernel_is_run() -> None:
    (folder,) = kernels.__path__
    launching = {path.stem for path in Path(folder).glob("*.py") if re.search(r"_kernel\[", path.read_text())}
    assert {name.partition(",")[0] for name in memcheck.CASES} == launching


def test_every_case_equals_its_twin(capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck.check(memcheck.CASES) == []
    assert len(capsys.readouterr().out.splitlines()) == len(memcheck.CASES)


@pytest.mark.parametrize("fault", [0.1, float("nan")])
def test_a_kernel_that_is_off_is_named(fault: float) -> None:
    twin = torch.ones(3)
    off = twin + torch.tensor([0.0, 0.0, fault])
    assert memcheck.check({"right": lambda: [(twin, twin)], "wrong": lambda: [(twin, twin), (off, twin)]}) == ["wrong"]


def test_it_wants_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
    monkeypatch.setattr(memcheck, "DEVICE", torch.device("cpu"))
    assert memcheck.main() == 2
