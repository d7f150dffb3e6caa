"""Runs pytest on every supported Python with the oldest and the newest torch and transformers: `make test-matrix`.

Each cell gets a virtual environment of its own, one after the other, and the results go to docs/test-matrix.md. The
cell of the lowest Python with the oldest versions pins every dependency to its lower bound in pyproject.toml.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "test-matrix.md"
PYTHONS = ("3.11", "3.12", "3.13")
OLDEST = ("torch==2.11.*", "transformers==5.17.*")
NEWEST = ("torch", "transformers")
VERSIONS_SHOWN = ("torch", "transformers")


@dataclass(frozen=True)
class Cell:
    python: str
    label: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.python}-{self.label}"


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    versions: dict[str, str]
    summary: str
    passed: bool
    seconds: float


def cells() -> list[Cell]:
    lowest = Cell(PYTHONS[0], "lowest", OLDEST, lower_bounds())
    oldest = [Cell(python, "oldest", OLDEST) for python in PYTHONS[1:]]
    return [lowest, *oldest, *(Cell(python, "newest", NEWEST) for python in PYTHONS)]


def lower_bounds() -> tuple[str, ...]:
    """`name>=1.2` of pyproject.toml's dependencies as the constraint `name==1.2`."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return tuple(re.sub(r"(\[.*\])?>=([^,;]+).*", r"==\2", line) for line in dependencies)


def find_interpreter(version: str) -> str:
    """The first that runs and is of this version: the variable PYTHON311, python3.11 on PATH, pyenv's."""
    wanted = tuple(int(part) for part in version.split("."))
    for candidate in _candidates(version):
        command = [candidate, "-c", "import sys, ensurepip; print(*sys.version_info[:2])"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            continue
        if answer.returncode == 0 and tuple(map(int, answer.stdout.split())) == wanted:
            return candidate
    variable = _variable(version)
    raise SystemExit(f"No Python {version} was found. Install it, or name it: {variable}=/path/to/python{version}")


def _variable(version: str) -> str:
    return f"PYTHON{version.replace('.', '')}"


def _candidates(version: str) -> Iterator[str]:
    if named := os.environ.get(_variable(version)):
        yield named
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True))


def run_cell(cell: Cell, interpreter: str, folder: Path, pytest_arguments: Sequence[str]) -> Outcome:
    started = time.monotonic()
    environment = folder / cell.name
    python = str(environment / "bin" / "python")
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(cell.constraints))
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, *cell.requirements], check=True, cwd=ROOT)
    subprocess.run([*install, *cell.requirements, "--editable", ".[test]"], check=True, cwd=ROOT)
    if subprocess.run([python, "-c", "import triton"], capture_output=True).returncode:
        subprocess.run([*install, "--editable", ".[interpreter]"], check=True, cwd=ROOT)
    summary, passed = _run_pytest(python, pytest_arguments)
    return Outcome(cell, _versions(python), summary, passed, time.monotonic() - started)


def _run_pytest(python: str, arguments: Sequence[str]) -> tuple[str, bool]:
    process = subprocess.Popen([python, "-m", "pytest", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = "no output"
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip(" =\n") or last
    return re.sub(r" in [0-9.]+s.*", "", last), process.wait() == 0


def _versions(python: str) -> dict[str, str]:
    script = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    answer = subprocess.run([python, "-c", script, *VERSIONS_SHOWN], capture_output=True, text=True, check=True)
    return dict(zip(VERSIONS_SHOWN, answer.stdout.split(), strict=True))


def report(outcomes: Sequence[Outcome]) -> str:
    rows = [
        f"| {outcome.cell.python} | {outcome.cell.label} | {outcome.versions['torch']} "
        f"| {outcome.versions['transformers']} | {outcome.summary} | {outcome.seconds / 60:.0f} min |"
        for outcome in outcomes
    ]
    introduction = (
        f"Written by `make test-matrix` on {time.strftime('%Y-%m-%d')}, {platform.machine()} Linux, {os.cpu_count()} "
        "cores. `lowest` has every dependency at its lower bound in pyproject.toml, `oldest` only torch and "
        "transformers; `newest` is what pip installs when nothing is asked for."
    )
    header = "| Python | versions | torch | transformers | pytest | time, installing included |"
    return "\n".join(["# Test matrix", "", introduction, "", header, "| --- " * 6 + "|", *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", metavar="CELL", help="e.g. 3.12-newest; repeatable; not recorded")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix", help="where the environments are made")
    parser.add_argument("--keep", action="store_true", help="keep the environments (about 6 GB each with CUDA)")
    parser.add_argument("pytest_arguments", nargs="*", help="after --")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if not arguments.only or cell.name in arguments.only]
    if not chosen:
        parser.error(f"--only takes one of {', '.join(cell.name for cell in cells())}")
    interpreters = {cell.python: find_interpreter(cell.python) for cell in chosen}
    outcomes: list[Outcome] = []
    for cell in chosen:
        print(f"== {cell.name}: {interpreters[cell.python]}, {' '.join(cell.requirements)}", flush=True)
        outcomes.append(run_cell(cell, interpreters[cell.python], arguments.folder, arguments.pytest_arguments))
        if not arguments.keep:
            shutil.rmtree(arguments.folder / cell.name)
        print(report(outcomes), flush=True)
    if not arguments.only:
        RESULTS.write_text(report(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
