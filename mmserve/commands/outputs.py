"""Where results go: standard output, a folder that mirrors the inputs, the report of what failed."""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmserve.commands.progress import Display
from mmserve.pipelines.batch import Failure, Source

if TYPE_CHECKING:
    from mmserve.pipelines.tasks import TaskResult

OutputFormat = Literal["md", "json", "jsonl"]
JOURNAL_NAME = ".mmserve-done.jsonl"
_PART_PREFIX, _PART_SUFFIX = ".mmserve-", ".part"


def render(result: "TaskResult", output_format: OutputFormat) -> str:
    """A result as text that ends in a newline; `jsonl` is one line."""
    if output_format == "md":
        return result.to_markdown().rstrip("\n") + "\n"
    indent = 2 if output_format == "json" else None
    return json.dumps(result.to_dict(), ensure_ascii=False, indent=indent) + "\n"


class OutputFolder:
    """Results under `root`, one file a document, named like it with the format's suffix added.

    A journal in `root` says of what bytes and options each was made; `options` is anything that tells options apart.
    A result is whole on the disk before its line is, and a line is written in one piece: whatever ends the process,
    what the journal names is there.
    """

    def __init__(self, root: Path, output_format: OutputFormat, *, options: str) -> None:
        self.root = root
        self._format = output_format
        self._options = options
        self._journal = root / JOURNAL_NAME
        self._done: dict[str, str] = {}
        self._made: dict[str, tuple[str, str]] = {}
        self._problems: dict[str, list[dict[str, Any]]] = {}
        self._ends_torn = False

    def path(self, source: Source) -> Path:
        return self.root / f"{source.name}.{self._format}"

    def load_journal(self) -> None:
        """Read what earlier runs have done; a line cut short by a crash is passed over."""
        with contextlib.suppress(FileNotFoundError), self._journal.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._ends_torn = not line.endswith("\n")
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    self._remember(entry)

    def _remember(self, entry: dict[str, Any]) -> None:
        self._done[entry["output"]] = entry["made_from"]
        self._made[entry["made_from"]] = entry["output"], entry.get("name", "")
        self._problems[entry["made_from"]] = entry.get("problems", [])

    def remove_leftovers(self) -> None:
        """Take away what a process that was killed had begun to write."""
        for path in self.root.rglob(f"{_PART_PREFIX}*{_PART_SUFFIX}"):
            path.unlink(missing_ok=True)

    def is_done(self, source: Source, digest: str) -> bool:
        path = self.path(source)
        return self._done.get(self._entry_name(path)) == self._made_from(digest) and path.is_file()

    def take_over(self, source: Source, digest: str) -> bool:
        """Write the result of a document that was done under another name, as one that was moved since."""
        output, name = self._made.get(self._made_from(digest), ("", ""))
        if self._done.get(output) != self._made_from(digest):
            return False
        try:
            text = renamed((self.root / output).read_text(encoding="utf-8"), self._format, name, source.title)
        except (OSError, ValueError):
            return False
        if text is None:
            return False
        self.write(source, digest, text, self.problems(digest))
        return True

    def problems(self, digest: str) -> Sequence[dict[str, Any]]:
        """Pages of a document that was done before which could not be read: number, code and message."""
        return self._problems.get(self._made_from(digest), [])

    def write(self, source: Source, digest: str, text: str, problems: Sequence[dict[str, Any]] = ()) -> None:
        path = self.path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        entry: dict[str, Any] = {
            "output": self._entry_name(path),
            "made_from": self._made_from(digest),
            "name": source.title,
        }
        entry |= {"problems": list(problems)} if problems else {}
        self._add_line(json.dumps(entry))
        if self._done:
            self._remember(entry)

    def _add_line(self, line: str) -> None:
        begin = "\n" if self._ends_torn else ""
        file = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, f"{begin}{line}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
        self._ends_torn = False

    def _entry_name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _made_from(self, digest: str) -> str:
        return hashlib.sha256(f"{digest}\n{self._options}".encode()).hexdigest()


def renamed(text: str, output_format: OutputFormat, name: str, new_name: str) -> str | None:
    """A rendered result under another name, None where its name cannot be told."""
    if output_format != "md":
        result = json.loads(text)
        if not isinstance(result, dict) or result.get("name") != name:
            return None
        indent = 2 if output_format == "json" else None
        return json.dumps(result | {"name": new_name}, ensure_ascii=False, indent=indent) + "\n"
    title, newline, rest = text.partition("\n")
    for pattern in ("# {}", "<!-- {} -->"):
        if title == pattern.format(name) and "--" not in new_name and new_name == " ".join(new_name.split()):
            return pattern.format(new_name) + newline + rest
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write beside the place under a temporary name, then rename: nobody ever sees half a file."""
    temporary = path.with_name(f"{_PART_PREFIX}{secrets.token_hex(8)}{_PART_SUFFIX}")
    try:
        with temporary.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class ResultPrinter:
    """Results on standard output. JSON is one value: the object itself for a single document, else an array."""

    def __init__(
        self, output_format: OutputFormat, *, is_single: bool, is_silent: bool, around_write: Callable[[], Any]
    ) -> None:
        self.output_format: OutputFormat = output_format
        self._is_silent = is_silent
        self._is_array = output_format == "json" and not is_single
        self._around_write = around_write
        self._num_printed = 0

    def print(self, text: str) -> None:
        first = self._num_printed == 0
        self._num_printed += 1
        if self._is_array:
            self._write(("[\n" if first else ",\n") + text.rstrip("\n"))
        else:
            self._write(text if first or self.output_format != "md" else f"\n{text}")

    def close(self) -> None:
        """End the array; what was printed is then whole, even after an interruption."""
        if self._is_array:
            self._write("\n]\n" if self._num_printed else "[]\n")

    def _write(self, text: str) -> None:
        if self._is_silent:
            return
        with self._around_write():
            sys.stdout.write(text)
            sys.stdout.flush()


@contextlib.contextmanager
def failure_report(path: Path | None) -> Iterator[Callable[[Failure], None]]:
    """A function that adds one line for each failure to `path`, or does nothing without one."""
    if path is None:
        yield lambda _: None
        return
    with path.open("w", encoding="utf-8") as file:

        def add(failure: Failure) -> None:
            file.write(json.dumps(failure.to_dict(), ensure_ascii=False) + "\n")
            file.flush()

        yield add


class DocumentSink:
    """Writes each result where it belongs, and tells of failures and progress."""

    def __init__(
        self,
        folder: OutputFolder | None,
        printer: ResultPrinter,
        report: Callable[[Failure], None],
        display: Display,
    ) -> None:
        self._folder = folder
        self._printer = printer
        self._report = report
        self._display = display

    def is_done(self, source: Source, digest: str) -> bool:
        folder = self._folder
        if folder is None or not (folder.is_done(source, digest) or folder.take_over(source, digest)):
            return False
        for problem in folder.problems(digest):
            self._report(Failure(source.label, **problem))
        self._display.advance()
        return True

    def write(self, source: Source, digest: str, result: "TaskResult") -> None:
        named = dataclasses.replace(result, name=source.title)
        text = render(named, self._printer.output_format)
        problems: list[dict[str, Any]] = [
            {"page": page.number, "code": page.problem.code, "message": page.problem.message}
            for page in result.pages
            if page.problem is not None
        ]
        if self._folder is not None:
            self._folder.write(source, digest, text, problems)
        self._printer.print(text)
        for problem in problems:
            self._tell(Failure(source.label, **problem))
        self._display.advance()

    def fail(self, failure: Failure) -> None:
        self._tell(failure)
        self._display.advance()

    def _tell(self, failure: Failure) -> None:
        page = "" if failure.page is None else f", page {failure.page}"
        where = "" if failure.path in failure.message else f"{failure.path}{page}: "
        self._display.error(f"mmserve: {where}{failure.message} ({failure.code})")
        self._report(failure)
