import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmserve.commands.pull import app
from mmserve.errors import SetupError
from mmserve.weights import embedded

CONTENT = b"GGUF" + b"weights" * 1000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "NUM_BYTES", len(CONTENT))
    monkeypatch.setenv("MMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "source.gguf"
    path.write_bytes(CONTENT)
    return path


def test_path_on_stdout_and_notice_on_stderr(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["smollm2-135m", "--from", str(source)])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "cache" / embedded.FILE_NAME)
    assert "demonstration" in result.stderr
    assert "--model" in result.stderr


def test_quiet_prints_the_path_alone(source: Path) -> None:
    result = CliRunner().invoke(app, ["smollm2-135m", "--from", str(source), "--quiet"])
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_what_cannot_be_fetched_is_a_setup_error() -> None:
    result = CliRunner().invoke(app, ["no-such-model"])
    assert isinstance(result.exception, SetupError)
