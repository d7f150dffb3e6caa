"""What every command over documents shares: its options, and how it runs a task over all that was named."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmserve.commands.inputs import STANDARD_INPUT_NAME, DocumentFinder, Selection, standard_input_source
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions
from mmserve.commands.outputs import (
    DocumentSink,
    OutputFolder,
    OutputFormat,
    ResultPrinter,
    failure_report,
)
from mmserve.commands.paths import named_path, writable_folder
from mmserve.commands.progress import BAR_TITLE, Display, show_log
from mmserve.commands.remote import RemoteOptions, RemoteServer
from mmserve.errors import RequestError
from mmserve.pipelines.batch import BatchOptions, BatchTotals, Source, file_digest, run_batch
from mmserve.weights import hub

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.pipelines.tasks import TaskResult
    from mmserve.vision.pages import PageReader

EXIT_SOME_FAILED, EXIT_INTERRUPTED = 1, 130


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


DocumentPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE|DIR|-...", parser=named_path, help="Documents, folders of them, or - for standard input."
    ),
]
_IN, _OUT, _RUN = "Which documents", "Results", "Running"


@dataclass(frozen=True, kw_only=True)
class BatchCommandOptions(RemoteOptions):
    """Which files, where results go, and what happens on the way."""

    recursive: Annotated[bool, _option(_IN, "--recursive", "-r", help="Go into subfolders.")] = False
    include: Annotated[
        list[str] | None,
        _option(_IN, metavar="PATTERN", help="In folders, take files that match, whatever their type; repeatable."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        _option(_IN, metavar="PATTERN", help="In folders, leave out files and folders that match; repeatable."),
    ] = None
    output_dir: Annotated[
        Path | None,
        _option(
            _OUT,
            "--output-dir",
            "-o",
            parser=named_path,
            metavar="DIR",
            help="Write results below this folder as well.",
        ),
    ] = None
    format: Annotated[OutputFormat, _option(_OUT, "--format", "-f", help="How results look.")] = "md"
    resume: Annotated[
        bool, _option(_OUT, "--resume", help="Skip what is in --output-dir for the same content and options.")
    ] = False
    force: Annotated[bool, _option(_OUT, "--force", help="Write over results that exist.")] = False
    report: Annotated[
        Path | None, _option(_OUT, help="Write a line of JSON here for each failure: path, code, message, page.")
    ] = None
    jobs: Annotated[int, _option(_RUN, "--jobs", "-j", min=1, help="Documents worked on at once.")] = 4
    timeout: Annotated[float | None, _option(_RUN, metavar="SECONDS", help="Time that a document may take.")] = None
    retries: Annotated[
        int, _option(_RUN, min=0, help="Try a document again where that may help: an overload, a time limit.")
    ] = BatchOptions.retries
    fail_fast: Annotated[bool, _option(_RUN, "--fail-fast", help="Stop at the first document that fails.")] = False
    dry_run: Annotated[bool, _option(_RUN, "--dry-run", help="Say what would be done, and do nothing.")] = False
    quiet: Annotated[
        bool, _option(_RUN, "--quiet", "-q", help="Only errors on the terminal; with -o, no results there either.")
    ] = False
    verbose: Annotated[bool, _option(_RUN, "--verbose", "-v", help="Say more, with tracebacks.")] = False

    def check(self) -> None:
        """Raises `RequestError` for options that do not go together."""
        super().check()
        if self.output_dir is None and (self.resume or self.force):
            raise RequestError("invalid_request", "--resume and --force need --output-dir", param="output_dir")
        if self.resume and self.force:
            raise RequestError("invalid_request", "--resume skips what --force does again: choose one", param="force")
        if self.report is not None and not self.report.parent.is_dir():
            raise RequestError("invalid_request", f"the folder of {self.report} does not exist", param="report")


Worker = Callable[[Source], "Awaitable[TaskResult]"]


@dataclass(frozen=True)
class DocumentTask:
    """Something to do with documents.

    `options` tells apart what would give other results. `start` makes the function that does one document, of the
    engine, the reader of pages and the builder of prompts; what it tells the callback is shown to the user meanwhile.
    `start_remote` makes the one that has a server do it, of the server and the fields of its form beside the task's
    own.
    """

    name: str
    options: str
    start: "Callable[[EngineClient, PageReader, PromptBuilder, Callable[[str], None]], Worker]"
    start_remote: Callable[[RemoteServer, Mapping[str, Any], Callable[[str], None]], Worker]


@dataclass(frozen=True)
class ModelOptions:
    """How the model and the pages are handled, whatever the task."""

    engine: EngineOptions
    documents: DocumentOptions
    vision: VisionOptions = field(default_factory=VisionOptions)

    @property
    def identity(self) -> tuple[object, ...]:
        """What decides results."""
        engine, documents, vision = self.engine, self.documents, self.vision
        return (
            (engine.model, engine.dtype, engine.load_format, engine.max_model_len, engine.seed),
            (documents.ocr, documents.renderer, documents.dpi),
            (vision.max_pixels, vision.min_pixels),
        )

    def check(self) -> None:
        """Raises `RequestError` for what is wrong in itself: better before a model is loaded."""
        self.engine.to_config()
        self.vision.to_limits()


def run_task(paths: list[Path], task: DocumentTask, files: BatchCommandOptions, options: ModelOptions) -> None:
    """Do `task` for all documents. Raises `typer.Exit` if some failed, `MMServeError` for what ends it all."""
    show_log(verbose=files.verbose)
    files.check()
    options.check()
    selection = Selection(recursive=files.recursive, include=files.include or (), exclude=files.exclude or ())
    finder = DocumentFinder(paths, selection, files.output_dir)
    folder = _output_folder(task, files, options)
    num_documents = _look_over(finder, folder, overwrites=files.force or files.resume)
    if files.dry_run:
        _print_plan(finder, folder)
    else:
        if folder is not None:
            writable_folder(folder.root, "output_dir")
        _Run(task, files, finder, folder).run(num_documents, options)


def _output_folder(task: DocumentTask, files: BatchCommandOptions, options: ModelOptions) -> OutputFolder | None:
    if files.output_dir is None:
        return None
    where = options.identity if files.server is None else (files.server, options.engine.model, *options.identity[-1:])
    identity = repr((task.name, task.options, *where))
    folder = OutputFolder(files.output_dir, files.format, options=identity)
    if files.resume:
        folder.load_journal()
    if not files.dry_run:
        folder.remove_leftovers()
    return folder


def _look_over(finder: DocumentFinder, folder: OutputFolder | None, *, overwrites: bool) -> int:
    """The number of documents. Raises `RequestError` if there are none, or naming a result that is in the way."""
    num_documents = 0
    for source in _planned(finder):
        num_documents += 1
        path = None if folder is None or overwrites else folder.path(source)
        if path is not None and os.path.lexists(path):
            message = f"{path} exists: --resume skips what is done already, --force writes over it"
            raise RequestError("invalid_request", message, param="output_dir")
    if num_documents == 0:
        raise RequestError("invalid_request", _none_found(finder))
    return num_documents


def _none_found(finder: DocumentFinder) -> str:
    message = "no documents found"
    if finder.num_left_out:
        message += f" (other files left out: {finder.num_left_out}; --include '*' takes them)"
    return message + ("" if finder.selection.recursive else "; -r goes into subfolders")


def _planned(finder: DocumentFinder) -> Iterator[Source]:
    """All sources, before anything is read from standard input."""
    if finder.reads_standard_input:
        yield Source(Path("-"), STANDARD_INPUT_NAME, shown="standard input")
    yield from finder


def _print_plan(finder: DocumentFinder, folder: OutputFolder | None) -> None:
    for source in _planned(finder):
        if folder is None:
            typer.echo(source.label)
        elif not _is_done(folder, source):
            typer.echo(f"{source.label} -> {folder.path(source)}")


def _is_done(results: OutputFolder | DocumentSink, source: Source) -> bool:
    """Not for what cannot be read. A source with a problem may be a pipe, which would be waited for."""
    if source.problem is not None:
        return False
    try:
        digest = file_digest(source.path)
    except OSError:
        return False
    return results.is_done(source, digest)


class _Run:
    """One run of a command, from the first document that is not done yet."""

    def __init__(
        self, task: DocumentTask, files: BatchCommandOptions, finder: DocumentFinder, folder: OutputFolder | None
    ) -> None:
        self._task = task
        self._files = files
        self._finder = finder
        self._folder = folder
        self._batch_options = BatchOptions(
            jobs=files.jobs, timeout=files.timeout, fail_fast=files.fail_fast, retries=files.retries
        )
        self._totals = BatchTotals()
        self._display = Display(quiet=files.quiet)

    def run(self, num_documents: int, options: ModelOptions) -> None:
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(failure_report(self._files.report))
            sources: Iterable[Source] = self._finder
            if self._finder.reads_standard_input:
                sources = itertools.chain([stack.enter_context(standard_input_source())], sources)
            printer = stack.enter_context(contextlib.closing(self._printer()))
            stack.enter_context(self._display)
            self._display.expect(num_documents)
            sink = DocumentSink(self._folder, printer, report, self._display)
            stack.enter_context(ending_like_interrupted())
            with self._saying_when_interrupted():
                self._run_batch(self._not_done(sources, sink), sink, options)
        self._finish()

    def _printer(self) -> ResultPrinter:
        files = self._files
        around = self._display.paused if sys.stdout.isatty() else contextlib.nullcontext
        is_silent = files.quiet and files.output_dir is not None
        return ResultPrinter(files.format, is_single=self._finder.is_single, is_silent=is_silent, around_write=around)

    def _not_done(self, sources: Iterable[Source], sink: DocumentSink) -> Iterator[Source]:
        """The sources from the first that an earlier run has not done: often there is none, and no model is needed."""
        remaining = iter(sources)
        for source in remaining:
            if self._folder is None or not _is_done(sink, source):
                return itertools.chain([source], remaining)
            self._totals.num_skipped += 1
        return iter(())

    def _run_batch(self, sources: Iterator[Source], sink: DocumentSink, options: ModelOptions) -> None:
        first = next(sources, None)
        if first is None:
            return
        if self._files.server is not None:
            asyncio.run(self._work_remotely(itertools.chain([first], sources), sink, options))
            return
        if hub.is_demo(options.engine.model):
            self._display.note(hub.DEMO_NOTICE)
        self._display.describe(f"Loading {options.engine.model}")
        # Its processes start with the first page, but its options are checked now.
        reader = options.documents.open_reader()
        with (
            started_engine(options.engine) as client,
            contextlib.closing(options.vision.open_prompts(client, options.documents.to_limits())) as prompts,
            # Said before the engine is closed, which waits for the step that it is in.
            self._saying_when_interrupted(),
        ):
            start = partial(self._task.start, client, reader, prompts, self._display.describe)
            asyncio.run(self._work(itertools.chain([first], sources), sink, start, reader))

    @contextlib.contextmanager
    def _saying_when_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._display.error(f"Interrupted. {self._outcome()}")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    async def _work(
        self, sources: Iterable[Source], sink: DocumentSink, start: Callable[[], Worker], reader: "PageReader"
    ) -> None:
        async with reader:
            self._display.describe(BAR_TITLE)
            await run_batch(sources, start(), sink, self._batch_options, self._totals)

    async def _work_remotely(self, sources: Iterable[Source], sink: DocumentSink, options: ModelOptions) -> None:
        files = self._files
        is_default = options.engine.model == EngineOptions.model
        fields = {
            "model": None if is_default else options.engine.model,
            "no_cache": files.no_cache or None,
            "max_pixels": options.vision.max_pixels,
            "min_pixels": options.vision.min_pixels,
        }
        async with RemoteServer.connected(files, num_connections=files.jobs) as server:
            self._display.describe(BAR_TITLE)
            work = self._task.start_remote(server, fields, self._display.describe)
            await run_batch(sources, work, sink, self._batch_options, self._totals)

    def _outcome(self) -> str:
        totals = self._totals
        copies = f" ({totals.num_copied} equal to another)" if totals.num_copied else ""
        skipped = f", {totals.num_skipped} skipped" if totals.num_skipped else ""
        return f"Done: {totals.num_done}{copies}{skipped}, {totals.num_failed} failed."

    def _finish(self) -> None:
        if self._totals.num_failed or self._display.is_live:
            self._display.note(self._outcome())
        if self._totals.num_failed:
            raise typer.Exit(EXIT_SOME_FAILED)


@contextlib.contextmanager
def ending_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that nothing half-done is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def started_engine(options: EngineOptions) -> "Iterator[EngineClient]":
    """An engine that may still be loading (requests wait for it), closed at the end. Raises `SetupError`."""
    config = options.to_config()
    from mmserve.engine.client import EngineClient

    client = EngineClient.start(config)
    try:
        yield client
    finally:
        client.close()
