"""What users install: the wheel, built from the sdist, holds real folders where the repository has links."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED_FOLDERS = ("kernels", "pipelines", "vision")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr + result.stdout
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dist.glob("*.whl")))


def _metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def _modules_in_tree() -> set[str]:
    folders = [ROOT / "mmserve", *(ROOT / name for name in LINKED_FOLDERS)]
    paths = {path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()}
    paths = {path for path in paths if not (path.parts[0] == "mmserve" and path.parts[1] in LINKED_FOLDERS)}
    return {str(path if path.parts[0] == "mmserve" else "mmserve" / path) for path in paths}


def test_the_wheel_holds_every_module_once_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    python_files = [name for name in wheel.namelist() if name.endswith(".py")]
    assert sorted(python_files) == sorted(_modules_in_tree())
    others = {name.split("/")[0] for name in wheel.namelist()} - {"mmserve"}
    assert all(name.endswith(".dist-info") for name in others)
    assert "mmserve/py.typed" in wheel.namelist()


@pytest.mark.parametrize("folder", ["vision", "pipelines"])
def test_the_linked_folders_are_folders_in_the_wheel(wheel: zipfile.ZipFile, folder: str) -> None:
    assert [name for name in wheel.namelist() if name.startswith(f"mmserve/{folder}/") and name.endswith(".py")]


def test_the_wheel_holds_the_page(wheel: zipfile.ZipFile) -> None:
    page = {f"mmserve/server/static/{path.name}" for path in (ROOT / "mmserve/server/static").iterdir()}
    assert "mmserve/server/static/index.html" in page
    assert page <= set(wheel.namelist())


def test_the_wheel_holds_no_links(wheel: zipfile.ZipFile) -> None:
    link_type, type_mask = 0o120000, 0o170000
    assert not [info.filename for info in wheel.infolist() if (info.external_attr >> 16) & type_mask == link_type]


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    runtime = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(runtime) == sorted(project["dependencies"])
    assert [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "mmserve = mmserve.cli:main" in wheel.read(entry_points).decode()


def test_the_sdist_holds_the_sources_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "mmserve/errors.py"} <= names
    assert {name.split("/")[0] for name in names} <= {
        *("mmserve", "vision", "kernels", "pipelines"),
        *("LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"),
    }


def test_torchvision_is_not_needed() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [line for line in dependencies if line.startswith("torchvision")]
    assert all(">=" in line for line in dependencies)


def test_the_root_folders_are_no_packages_of_their_own() -> None:
    for name in LINKED_FOLDERS:
        link = ROOT / "mmserve" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        assert link.is_dir()
        assert not (ROOT / name / "__init__.py").exists()
