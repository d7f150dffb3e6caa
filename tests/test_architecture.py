"""The arrows of docs/architecture.md, read off the imports of every module; and the size of files and functions."""

import ast
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED_FOLDERS = ("kernels", "pipelines", "vision")

# From the top down. A package imports itself and the lines below its own; names on one line do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("commands",),
    ("server",),
    ("jobs",),
    ("pipelines", "bench", "quantizer"),
    ("llm",),
    ("engine",),
    ("cache",),
    ("models",),
    ("vision",),
    ("weights",),
    ("attention", "layers"),
    ("quantization",),
    ("kernels",),
)
LEAVES = frozenset({"config", "errors", "request"})
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}

TORCH_LIKE = frozenset({"torch", "torchvision", "transformers", "triton"})
WITHOUT_TORCH = (
    "mmserve.jobs",
    "mmserve.pipelines",
    "mmserve.vision.pages",
    "mmserve.vision.image",
    "mmserve.vision.ocr",
    "mmserve.engine.scheduler",
    "mmserve.cache.block_pool",
    "mmserve.cache.prefix_cache",
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @property
    def component(self) -> str:
        """`cache` of `mmserve.cache.block_pool`; empty for `mmserve` itself."""
        return component(self.name)


def component(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def read_modules(package: Path) -> list[Module]:
    return [_read_module(package, path) for path in _python_files(package)]


def _python_files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".py"))


def _read_module(package: Path, path: Path) -> Module:
    parts = path.relative_to(package.parent).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)


def imported_names(module: Module) -> set[str]:
    """Absolute names that a module imports, wherever in it: `import a.b`, `from a import b` (both `a` and `a.b`),
    relative ones, those inside functions and type checks, and `import_module("a.b")` with a literal name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_base(module, node)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            names |= _dynamic_import(node)
    return names


def _absolute_base(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, *([node.module] if node.module else [])])


def _dynamic_import(call: ast.Call) -> set[str]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in {"import_module", "__import__"} or not call.args:
        return set()
    target = call.args[0]
    return {target.value} if isinstance(target, ast.Constant) and isinstance(target.value, str) else set()


def upward_imports(modules: list[Module]) -> list[str]:
    """Imports that point up, sideways, or from a leaf or a kernel to where it may not look."""
    return [
        f"{module.name} imports {name}"
        for module in modules
        for name in sorted(imported_names(module))
        if name.partition(".")[0] == "mmserve" and not _may_import(module.component, component(name))
    ]


def _may_import(importer: str, imported: str) -> bool:
    if importer == imported or imported not in DEPTH.keys() | LEAVES:
        return True
    if imported in LEAVES:
        return importer != "kernels"
    return importer in DEPTH and DEPTH[importer] < DEPTH[imported]


def misplaced_modules(modules: list[Module]) -> list[str]:
    known = DEPTH.keys() | LEAVES | {"", "__main__"}
    return [f"{module.name} belongs to no layer" for module in modules if module.component not in known]


def foreign_imports(modules: list[Module]) -> list[str]:
    """Leaves use the standard library alone; kernels use numpy, torch and compilers besides."""
    allowed = dict.fromkeys(LEAVES, frozenset[str]()) | {
        "kernels": frozenset({"llvmlite", "numba", "numpy", "torch", "triton"})
    }
    return [
        f"{module.name} imports {name}"
        for module in modules
        if module.component in allowed
        for name in sorted(imported_names(module))
        if name.partition(".")[0] not in sys.stdlib_module_names | {"mmserve"} | allowed[module.component]
    ]


def torch_imports(modules: list[Module]) -> list[str]:
    """Torch in a module that has to do without, or in a neighbour from the same package that it leans on."""
    by_name = {module.name: module for module in modules}
    starts = [name for name in by_name if any(f"{name}.".startswith(f"{prefix}.") for prefix in WITHOUT_TORCH)]
    return [
        f"{name} imports {imported}"
        for name in sorted(_with_neighbours(starts, by_name))
        for imported in sorted(imported_names(by_name[name]))
        if imported.partition(".")[0] in TORCH_LIKE
    ]


def _with_neighbours(names: list[str], by_name: Mapping[str, Module]) -> set[str]:
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        imported = imported_names(by_name[name]) & by_name.keys()
        waiting += [other for other in imported if component(other) == component(name) and other not in seen]
    return seen


def bare_imports(modules: list[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}: write mmserve.{name}"
        for module in modules
        for name in sorted(imported_names(module))
        if name.partition(".")[0] in LINKED_FOLDERS
    ]


def knowing_scheduler_and_runner(modules: list[Module]) -> list[str]:
    both = {"mmserve.engine.scheduler", "mmserve.engine.model_runner"}
    return [module.name for module in modules if both <= imported_names(module)]


def oversized(modules: list[Module]) -> list[str]:
    found = []
    for module in modules:
        num_lines = module.source.count("\n")
        if num_lines > MAX_FILE_LINES:
            found.append(f"{module.name} has {num_lines} lines")
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{module.name}: {node.name} has {length} lines")
    return found


RULES: tuple[Callable[[list[Module]], list[str]], ...] = (
    upward_imports,
    misplaced_modules,
    foreign_imports,
    torch_imports,
    bare_imports,
    oversized,
)


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read_modules(ROOT / "mmserve")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Callable[[list[Module]], list[str]], modules: list[Module]) -> None:
    assert rule(modules) == []


def test_only_the_engine_knows_scheduler_and_model_runner(modules: list[Module]) -> None:
    assert knowing_scheduler_and_runner(modules) == ["mmserve.engine.engine"]


def test_tests_and_samples_keep_the_sizes() -> None:
    files = [*_python_files(ROOT / "tests"), *_python_files(ROOT / "samples")]
    assert oversized([Module(str(path.relative_to(ROOT)), path.read_text()) for path in files]) == []


def test_the_modules_behind_the_links_are_read(modules: list[Module]) -> None:
    assert {"vision", "pipelines"} <= {module.component for module in modules}


def test_the_package_itself_imports_nothing_of_its_own_at_once() -> None:
    tree = ast.parse((ROOT / "mmserve" / "__init__.py").read_text())
    statements = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = imported_names(Module("mmserve", "\n".join(statements), is_package=True))
    assert not {name for name in names if name.partition(".")[0] == "mmserve"}


@pytest.mark.parametrize(
    "source",
    [
        "import mmserve.engine.scheduler",
        "import mmserve.engine as engine",
        "from mmserve import engine",
        "from mmserve.engine import scheduler",
        "from mmserve.engine.scheduler import Scheduler",
        "from ..engine import scheduler",
        "from .. import engine",
        "def late():\n    import mmserve.engine",
        "def late():\n    from mmserve.engine.scheduler import Scheduler",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mmserve.engine import scheduler",
        "import importlib\nimportlib.import_module('mmserve.engine.scheduler')",
    ],
)
def test_an_import_that_points_up_is_found_in_every_form(source: str) -> None:
    assert upward_imports([Module("mmserve.cache.block_pool", source)])
    assert not upward_imports([Module("mmserve.server.app", source)])


def test_relative_imports_count_from_the_package_they_stand_in() -> None:
    assert imported_names(Module("mmserve.cache", "from . import block_pool", is_package=True)) == {
        "mmserve.cache",
        "mmserve.cache.block_pool",
    }
    assert imported_names(Module("mmserve.cache.pool", "from .block_pool import BlockPool")) == {
        "mmserve.cache.block_pool",
        "mmserve.cache.block_pool.BlockPool",
    }


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("mmserve.pipelines.batch", "mmserve.bench.report"),
        ("mmserve.attention.base", "mmserve.layers.linear"),
        ("mmserve.kernels.rotary", "mmserve.config"),
        ("mmserve.errors", "mmserve.engine.engine"),
        ("mmserve.server.app", "mmserve.commands.serve"),
        ("mmserve.vision.pages", "mmserve.pipelines.document"),
    ],
)
def test_a_forbidden_pair_is_found(importer: str, imported: str) -> None:
    assert upward_imports([Module(importer, f"import {imported}")]) == [f"{importer} imports {imported}"]


def test_leaves_may_be_imported_by_all_but_kernels() -> None:
    allowed = [Module(f"mmserve.{layer[0]}.x", "from mmserve.errors import RequestError") for layer in LAYERS[:-1]]
    assert upward_imports([*allowed, Module("mmserve.config", "from mmserve.errors import RequestError")]) == []


def test_a_package_without_a_layer_is_found() -> None:
    assert misplaced_modules([Module("mmserve.helpers.text", "")]) == ["mmserve.helpers.text belongs to no layer"]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mmserve.errors", "import pydantic"),
        ("mmserve.request", "def late():\n    import numpy.typing"),
        ("mmserve.kernels.reference", "import transformers"),
    ],
)
def test_a_foreign_import_is_found(name: str, source: str) -> None:
    assert foreign_imports([Module(name, source)])


def test_kernels_may_import_torch_and_triton() -> None:
    assert not foreign_imports([Module("mmserve.kernels.rotary", "import math\nimport torch\nimport triton.language")])


@pytest.mark.parametrize("name", [*WITHOUT_TORCH, "mmserve.pipelines.summarize"])
def test_torch_is_found_where_it_must_not_be(name: str) -> None:
    assert torch_imports([Module(name, "def late():\n    import torch.nn")]) == [f"{name} imports torch.nn"]


def test_torch_is_found_in_a_neighbour_that_is_leaned_on() -> None:
    pages = Module("mmserve.vision.pages", "from mmserve.vision import workers")
    workers = Module("mmserve.vision.workers", "import torch")
    encoder = Module("mmserve.vision.encoder", "import torch")
    assert torch_imports([pages, workers, encoder]) == ["mmserve.vision.workers imports torch"]


def test_a_bare_import_of_a_linked_folder_is_found() -> None:
    assert bare_imports([Module("mmserve.cli", "from vision.pages import Page")])
    assert not bare_imports([Module("mmserve.cli", "from mmserve.vision.pages import Page")])


def test_knowing_both_halves_of_a_step_is_found() -> None:
    source = "from mmserve.engine.scheduler import Scheduler\nfrom mmserve.engine import model_runner"
    assert knowing_scheduler_and_runner([Module("mmserve.engine.client", source)]) == ["mmserve.engine.client"]


def test_sizes_are_counted() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert oversized([Module("mmserve.x", f"async def f():\n{body}")]) == ["mmserve.x: f has 61 lines"]
    assert not oversized([Module("mmserve.x", f"def f():\n{body[9:]}")])
    assert oversized([Module("mmserve.x", "x = 1\n" * 501)]) == ["mmserve.x has 501 lines"]
