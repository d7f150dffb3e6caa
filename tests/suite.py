"""What all tests share: the embedded model, the rule about skipping, and kernels without a GPU."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ONLY_GPU_SKIPS = "--only-gpu-skips"
# Tests in a module that is not named as one.
pytest.register_assert_rewrite("vision_equality")


def pytest_configure() -> None:
    """Without a GPU, Triton's kernels run in its interpreter; it asks when a kernel is defined."""
    if not _has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
        _let_scalars_bound_loops()


def _let_scalars_bound_loops() -> None:
    """Triton 3.6 keeps a scalar as an array of one element, which NumPy from 2.4 on does not take for an integer."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(ONLY_GPU_SKIPS, action="store_true", help="a skipped test that is not marked `gpu` fails")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and item.config.getoption(ONLY_GPU_SKIPS) and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and only tests marked `gpu` may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption(ONLY_GPU_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped as a whole: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's file in the user's cache, fetched there once."""
    from mmserve.weights.hub import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What programs keep between their runs is not the user's own in tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
