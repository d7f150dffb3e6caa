"""From what stands on the command line to the documents to read: folders, patterns, links, standard input."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from mmserve.errors import RequestError
from mmserve.pipelines.batch import Source, displayable

STANDARD_INPUT = Path("-")
STANDARD_INPUT_NAME = "stdin"
PICTURE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".webp",
    ".tif",
    ".tiff",
    ".gif",
    ".bmp",
    ".avif",
    ".heic",
    ".heif",
)
DOCUMENT_SUFFIXES = frozenset({".pdf", ".txt", *PICTURE_SUFFIXES})


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which files of a folder are documents.

    Patterns are matched with the file's name and with its path below the folder; `*` also stands for `/`. Without
    `include`, files whose names end like a document's are taken. Hidden files and folders never are.
    """

    recursive: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def takes(self, name: str, relative: str) -> bool:
        if self.drops(name, relative):
            return False
        if self.include:
            return _matches(self.include, name, relative)
        return os.path.splitext(name)[1].lower() in DOCUMENT_SUFFIXES

    def drops(self, name: str, relative: str) -> bool:
        return name.startswith(".") or _matches(self.exclude, name, relative)


def _matches(patterns: Iterable[str], name: str, relative: str) -> bool:
    return any(
        fnmatchcase(name, pattern)
        or fnmatchcase(relative, pattern)
        or fnmatchcase(relative, pattern.removeprefix("**/"))
        for pattern in patterns
    )


@dataclass
class DocumentFinder:
    """The documents that the arguments stand for, found anew at each iteration, a folder at a time.

    A source's name is its path below the folder that all arguments have in common (one folder alone: that folder), so
    two documents never have the same name. A folder is visited once, however many links lead to it; `skipped_folder`
    (where outputs go) is not visited. Raises `RequestError` for an argument that does not exist.
    """

    arguments: Sequence[Path]
    selection: Selection
    skipped_folder: Path | None = None
    num_left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.arguments = list(dict.fromkeys(self.arguments))
        for argument in self.arguments:
            _check_argument(argument)
        self._files = [path for path in self.arguments if path != STANDARD_INPUT and not path.is_dir()]
        self._folders = [path for path in self.arguments if path.is_dir()]
        self._base = _common_folder(self._files, self._folders)

    @property
    def is_single(self) -> bool:
        """Whether one file was asked for, rather than any number."""
        return len(self.arguments) == 1 and not self._folders

    @property
    def reads_standard_input(self) -> bool:
        return STANDARD_INPUT in self.arguments

    def __iter__(self) -> Iterator[Source]:
        """Files and folders; standard input is not among them."""
        self.num_left_out = 0
        named = {os.path.abspath(path): path for path in self._files}
        visited = set() if self.skipped_folder is None else {os.path.realpath(self.skipped_folder)}
        visited -= {os.path.realpath(path) for path in self._folders}
        for path in named.values():
            yield self._source(path)
        for folder in self._folders:
            yield from self._walk(folder, folder, visited, named)

    def _walk(self, folder: Path, top: Path, visited: set[str], named: dict[str, Path]) -> Iterator[Source]:
        real = os.path.realpath(folder)
        if real in visited:
            return
        visited.add(real)
        try:
            with os.scandir(folder) as entries:
                found = sorted((entry.name, _is_folder(entry)) for entry in entries)
        except OSError as error:
            yield Source(folder, self._name(folder), problem=f"the folder cannot be read: {error.strerror}")
            return
        for name, is_folder in found:
            path = folder / name
            relative = path.relative_to(top).as_posix()
            if is_folder:
                if self.selection.recursive and not self.selection.drops(name, relative):
                    yield from self._walk(path, top, visited, named)
            elif not self.selection.takes(name, relative):
                self.num_left_out += not name.startswith(".")
            elif os.path.abspath(path) not in named:
                yield self._source(path)

    def _source(self, path: Path) -> Source:
        problem = None if path.is_file() else "it is not a file, or a link that leads nowhere"
        return Source(path, self._name(path), problem)

    def _name(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._base)).as_posix()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link that leads back to itself is none; asking where it leads is an error."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _check_argument(argument: Path) -> None:
    if argument == STANDARD_INPUT or argument.is_file() or argument.is_dir():
        return
    shown = displayable(argument)
    if argument.exists():
        raise RequestError("invalid_request", f"{shown} is not a file or folder: pipe it in, and write - for its name")
    raise RequestError("invalid_request", f"{shown} does not exist")


def _common_folder(files: Sequence[Path], folders: Sequence[Path]) -> str:
    places = [os.path.dirname(os.path.abspath(path)) for path in files] + [os.path.abspath(path) for path in folders]
    return os.path.commonpath(places) if places else os.getcwd()


@contextlib.contextmanager
def standard_input_source() -> Iterator[Source]:
    """Standard input as a file, while the context lasts. Raises `RequestError` if it is a terminal."""
    if sys.stdin.isatty():
        raise RequestError("invalid_request", "- reads a document from standard input: pipe one in")
    with tempfile.NamedTemporaryFile(prefix="mmserve-stdin-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Source(Path(file.name), STANDARD_INPUT_NAME, shown="standard input")
