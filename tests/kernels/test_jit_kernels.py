"""Where compiled kernels are kept, on whose threads they run, and what a CPU gets without them."""

import ctypes
import errno
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.kernels import cpu_decode, cpu_fused, few_rows, jit, openmp, reference, simd
from mmserve.kernels.compiled import has_compiled_kernels
from mmserve.kernels.jit import Kernel
from mmserve.layers import kernel_set

CPU = torch.device("cpu")
COUNT_HITS = """
from mmserve.kernels import cpu_decode, cpu_fused, few_rows
kernels = few_rows._kernel(1, 4), few_rows._kernel(2, 4), cpu_fused._silu_kernel(), cpu_decode._kernel(2)
print([kernel._compiled.cache_hits for kernel in kernels])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in which Numba keeps what it compiles."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.nbc"))


def hits(kernel: Kernel) -> int:
    """1 for a kernel that was found, 0 for one that has been compiled."""
    count: int = kernel._compiled.cache_hits
    return count


def compiled_again(cached: Any, *arguments: int) -> Kernel:
    """As a new process would make it."""
    kernel: Kernel = cached.__wrapped__(*arguments)
    return kernel


def test_another_process_finds_what_was_compiled(folder: Path) -> None:
    kernels = [compiled_again(few_rows._kernel, num_rows, 4) for num_rows in (1, 2)]
    kernels += [compiled_again(cpu_fused._silu_kernel), compiled_again(cpu_decode._kernel, 2)]
    assert [hits(kernel) for kernel in kernels] == [0, 0, 0, 0]
    files = compiled_files(folder)
    assert len(files) == 4
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    found = subprocess.run(
        [sys.executable, "-c", COUNT_HITS],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert found.stdout.strip() == "[1, 1, 1, 1]"
    assert compiled_files(folder) == files


def test_a_kernel_is_compiled_anew_where_what_it_calls_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [hits(compiled_again(cpu_fused._silu_kernel)) for _ in range(3)] == [0, 1, 1]
    with monkeypatch.context() as changed:
        changed.setattr(jit, "_digest", lambda _: "another")
        assert [hits(compiled_again(cpu_fused._silu_kernel)) for _ in range(2)] == [0, 1]
    assert len(compiled_files(folder)) == 2
    assert hits(compiled_again(cpu_fused._silu_kernel)) == 1


def test_kernels_run_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refuse)
    assert hits(compiled_again(cpu_fused._silu_kernel)) == 0


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(5000)])
@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_damaged_files_are_compiled_anew(folder: Path, content: bytes, ending: str) -> None:
    assert hits(compiled_again(cpu_fused._add_kernel)) == 0
    for path in folder.rglob(f"*{ending}"):
        path.write_bytes(content)
    assert [hits(compiled_again(cpu_fused._add_kernel)) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("module", [simd, openmp])
def test_the_digest_is_of_the_sources(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, copy, own = jit._digest.__wrapped__, tmp_path / "copy.py", tmp_path / "own.py"
    own.write_text("kernel")
    before = digest(own)
    copy.write_bytes(Path(module.__file__).read_bytes())
    monkeypatch.setattr(module, "__file__", str(copy))
    assert digest(own) == before
    copy.write_bytes(copy.read_bytes() + b"\n")
    changed = digest(own)
    own.write_text("another")
    assert len({before, changed, digest(own)}) == 3


@pytest.mark.parametrize("missing", ["GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"])
def test_a_pytorch_on_other_threads_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = openmp._parallel

    class Library:
        def __init__(self, path: str) -> None:
            self.path = path

        def __getattr__(self, name: str) -> object:
            if name == missing:
                raise AttributeError(name)
            return real

    monkeypatch.setattr(ctypes, "CDLL", Library)
    with pytest.raises(ImportError, match="threads are not those of OpenMP"):
        runpy.run_path(str(openmp.__file__))


def test_a_pytorch_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(ImportError, match="threads are not those of OpenMP"):
        runpy.run_path(str(openmp.__file__))


def test_kernels_are_compiled_where_they_can_be() -> None:
    assert has_compiled_kernels()
    assert kernel_set.kernel_set(CPU) is cpu_fused


def test_without_openmp_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmserve.kernels.openmp")
    monkeypatch.setitem(sys.modules, "mmserve.kernels.openmp", None)
    assert not has_compiled_kernels.__wrapped__()


def test_without_compiled_kernels_pytorch_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set, "has_compiled_kernels", lambda: False)
    assert kernel_set.kernel_set(CPU) is reference


def _mark(arguments: Any) -> None:
    """Add 1 to each number of this thread's share, and say behind them which thread it was."""
    out, count = simd.unpack(arguments, 0, 2)
    first, last = openmp.share_of(count)
    for i in range(first, last):
        simd.store_float(out + 4 * i, simd.load_float(out + 4 * i) + 1)
        simd.store_float(out + 4 * (count + i), float(openmp.thread_number()))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_threads_share_all_and_nothing_twice(num_threads: int, count: int) -> None:
    out = torch.zeros(2, count)
    Kernel(_mark)(num_threads, out.data_ptr(), count)
    marks, numbers = out
    assert torch.equal(marks, torch.ones(count))
    shares = torch.bincount(numbers.long(), minlength=num_threads)
    assert len(shares) == num_threads
    assert int(shares.max()) - int(shares.min()) <= 1
    assert torch.equal(numbers, numbers.sort().values)


def test_scratch_grows_and_is_every_threads_own() -> None:
    def addresses() -> list[int]:
        return [openmp.scratch(size).data_ptr() for size in (100, 50, 1 << 20, 100)]

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(addresses).result()
        small, smaller, large, again = addresses()
        assert small == smaller
        assert large == again
        assert not {small, large} & set(theirs)
        assert pool.submit(openmp.scratch, 10).result().data_ptr() == theirs[-1]


def test_memory_of_its_own() -> None:
    before = openmp.scratch(100)
    with openmp.scratch_of_its_own():
        inside = openmp.scratch(100)
        assert openmp.scratch(50).data_ptr() == inside.data_ptr() != before.data_ptr()
    assert openmp.scratch(100).data_ptr() == before.data_ptr()


def test_without_compiling_there_are_no_compiled_kernels() -> None:
    script = "from mmserve.kernels.compiled import has_compiled_kernels; print(has_compiled_kernels())"
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
