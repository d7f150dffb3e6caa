"""The `mmserve` command: imports commands on demand, layers their settings, turns errors into sentences."""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mmserve import __version__
from mmserve.commands.settings import CommandOptions, find_settings, read_settings
from mmserve.errors import ErrorCode, MMServeError, RequestError, SetupError
from mmserve.kernels.thread_waits import wait_briefly

ENVIRONMENT_PREFIX = "MMSERVE"
ENGINE_THREAD = "engine"
EXIT_SOME_FAILED, EXIT_USAGE, EXIT_MISSING = 1, 2, 3
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
# What is wrong with the command line or the settings, a key for a server among them.
_USAGE_CODES: frozenset[ErrorCode] = frozenset(("invalid_request", "invalid_schema", "unauthorized", "forbidden"))

COMMANDS: Mapping[str, str] = {
    "summarize": "Summarise documents, with page citations.",
    "ask": "Ask documents, and get answers with page citations.",
    "extract": "Extract values from documents as JSON, each with its page.",
    "transcribe": "Write documents down as Markdown, page by page.",
    "chat": "Talk to the model.",
    "serve": "Answer over HTTP, with OpenAI's protocol beside that for documents.",
    "pull": "Fetch a model, so that later commands find it.",
    "quantize": "Make a model smaller: int4, int8 or FP8 weights.",
    "eval": "Measure how well a model predicts texts.",
    "bench": "Measure the engine's speed.",
}
_COMPLETION_OPTIONS = frozenset({"install_completion", "show_completion"})
_log = logging.getLogger(__name__)


class _HelpByPanel(TyperCommand):
    """Plain help that cuts nothing short, with options under the heading of their group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _CommandTable(Mapping[str, Any]):
    """Commands by name; each module is imported when its command is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = _load_command(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _load_command(name: str) -> Any:
    app: typer.Typer = importlib.import_module(f"mmserve.commands.{name}").app
    app.rich_markup_mode = None
    for info in app.registered_commands:
        info.cls = _HelpByPanel
    command = typer.main.get_command(app)
    command.name = name
    command.params = [parameter for parameter in command.params if parameter.name not in _COMPLETION_OPTIONS]
    _read_environment(command)
    return command


def _read_environment(command: Any) -> None:
    """Every option may come from a variable of one prefix, whatever command it belongs to."""
    command.context_settings = {**command.context_settings, "auto_envvar_prefix": ENVIRONMENT_PREFIX}
    for parameter in command.params:
        parameter.show_envvar = False
    for subcommand in getattr(command, "commands", {}).values():
        _read_environment(subcommand)


class _Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        vars(self)["commands"] = _CommandTable()

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except Exception as error:
            _end_with(error)


def _end_with(error: Exception) -> NoReturn:
    _log.debug("The command failed.", exc_info=error)
    if isinstance(error, BrokenPipeError):
        _drop_standard_output()
        raise typer.Exit(EXIT_CLOSED_PIPE)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_standard_output()
    typer.echo(f"mmserve: {_sentence(error)}", err=True)
    raise typer.Exit(_exit_code(error))


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is missing: install mmserve again, with its dependencies"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + ("" if error.filename is None else f": {error.filename}")
    if not isinstance(error, MMServeError):
        return f"unexpected {type(error).__name__}: {error} (a fault of mmserve; -v shows where)"
    return error.message


def _exit_code(error: Exception) -> int:
    if isinstance(error, SetupError | ModuleNotFoundError):
        return EXIT_MISSING
    return EXIT_USAGE if isinstance(error, RequestError) and error.code in _USAGE_CODES else EXIT_SOME_FAILED


def _leave_at_once(code: object) -> NoReturn:
    """For an engine that is still loading in its thread: the interpreter's own end would pull torch away from it."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def _drop_standard_output() -> None:
    """It takes no more; the interpreter's own flush at exit must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command_options(command: Any) -> CommandOptions:
    options = frozenset(p.name for p in command.params if p.param_type_name == "option" and p.name != "help")
    commands = {name: _command_options(sub) for name, sub in getattr(command, "commands", {}).items()}
    return CommandOptions(options, commands)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mmserve {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(no_args_is_help=True)
def _root(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar=f"{ENVIRONMENT_PREFIX}_CONFIG",
            help="Settings file, if not ./mmserve.toml or ~/.config/mmserve/mmserve.toml.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Understand documents on your own machine: pages go in, answers with page citations come out.

    \b
    Try:
      mmserve summarize report.pdf
      mmserve summarize scans/ -r -o summaries/
      mmserve chat "What is a purchase order?"
      mmserve serve

    Each option of a command may also be set by a variable (--max-model-len by MMSERVE_MAX_MODEL_LEN) or in
    mmserve.toml (max-model-len = 4096, at the top or in a table named after the command). A flag comes first, then the
    variable, then the file.

    \b
    Exit codes:
      0    all done
      1    some documents failed, or the work itself did
      2    the command line or the settings are wrong
      3    a model or a dependency is missing
      130  interrupted; what was done stays done
    """
    del version
    path = find_settings(config)
    if path is not None:
        ctx.default_map = read_settings(path, _command_options(ctx.command))


def main() -> None:
    """Run the command line; the exit code says how it went (see `mmserve --help`)."""
    wait_briefly()
    try:
        app(prog_name="mmserve")
    except SystemExit as end:
        if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
            _leave_at_once(end.code)
        raise
