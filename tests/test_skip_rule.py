"""The rule of suite.py about skipped tests, on a suite made for it."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_passes():
    pass

def test_skips_itself():
    pytest.skip("not today")

@pytest.mark.skip(reason="flaky")
def test_is_marked_to_be_skipped():
    pass

@pytest.mark.gpu
def test_needs_a_card():
    pytest.skip("no card")

@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    pytester.makeconftest(Path(__file__).with_name("suite.py").read_text())
    pytester.makepyfile(test_functions=TESTS, test_module="import pytest\npytest.importorskip('no_such_module')\n")
    return pytester


def test_skips_are_allowed_unless_the_option_is_given(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=4, xfailed=1)
    assert result.ret == pytest.ExitCode.OK


def test_with_the_option_only_a_gpu_test_may_be_skipped(suite: pytest.Pytester) -> None:
    arguments = ("-p", "no:cacheprovider", "--only-gpu-skips", "--continue-on-collection-errors")
    result = suite.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=1, failed=1, errors=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*test_skips_itself was skipped, and only tests marked `gpu` may be*not today*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
