"""`mmserve serve`: the engine and the document pipelines over HTTP."""

import logging
import signal
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmserve.commands.access import AccessOptions
from mmserve.commands.documents import EXIT_INTERRUPTED, started_engine
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.config import LogFormat, parse_bytes, parse_duration
from mmserve.weights import hub

SERVE_ENGINE = EngineOptions(engine_process=True)
app = typer.Typer()
_log = logging.getLogger(__name__)


def _option(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server", **settings)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, and how much to take."""

    host: Annotated[str, _option(help="Address to listen on; 0.0.0.0 lets other machines in, and needs API keys.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _option(help="Port to listen on; 0 chooses a free one and prints it.")] = 8000
    request_timeout: Annotated[
        float | None, _option(help="Seconds that a request may take; it ends with status 504.", show_default="no limit")
    ] = None
    upload_timeout: Annotated[float, _option(help="Seconds that a request's body may take to arrive.")] = 600.0
    queue_timeout: Annotated[
        float | None,
        _option(
            help="Seconds that a document may wait for its turn; it ends with status 429.", show_default="no limit"
        ),
    ] = None
    shutdown_timeout: Annotated[
        float, _option(help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.")
    ] = 30.0
    max_upload_size: Annotated[str, _option(metavar="SIZE", help="Largest upload, all its files together.")] = "256MiB"
    max_files: Annotated[int, _option(min=1, help="Files in one upload.")] = 64
    max_concurrent_documents: Annotated[
        int,
        _option(
            min=1,
            help="Documents of requests worked on at once, and as many of jobs; keys that want more get equal shares.",
        ),
    ] = 4
    upload_dir: Annotated[
        Path | None, _option(help="Folder for uploads while they are worked on.", show_default="the system's")
    ] = None
    max_images_per_request: Annotated[
        int, _option(min=1, help="Pictures and pages in one chat request; a PDF counts with all of its pages.")
    ] = 64
    max_media_size: Annotated[
        str,
        _option(metavar="SIZE", help="Most bytes of pictures and documents in a request of JSON, or at a URL."),
    ] = "32MiB"
    allowed_media_hosts: Annotated[
        list[str] | None,
        _option(
            metavar="HOST",
            help="Host from which requests may name pictures and documents by URL: host, host:port, *.domain or *;"
            " repeatable.",
            show_default="none",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            metavar="URL",
            help="Send traces there, by OTLP over HTTP (http://host:4318/v1/traces); needs mmserve[otel].",
            show_default="as OTEL_... say",
        ),
    ] = None
    log_format: Annotated[
        LogFormat, _option(help="Log lines on standard error: text, or an object of JSON each, with one a request.")
    ] = "text"
    data_dir: Annotated[
        Path | None,
        _option(help="Folder for stored files, jobs and results.", show_default="~/.local/state/mmserve"),
    ] = None
    database_url: Annotated[
        str | None,
        _option(
            metavar="URL",
            help="Database of jobs and results, such as postgresql+psycopg://user@host/name.",
            show_default="SQLite in the data folder",
        ),
    ] = None
    retention: Annotated[
        str, _option(metavar="TIME", help="How long files, jobs and results are kept: 7d, 12h, 30m.")
    ] = "7d"
    max_stored_size: Annotated[
        str, _option(metavar="SIZE", help="Of the files that one key may keep, such as 500MiB.")
    ] = "20GiB"
    max_queued_jobs: Annotated[
        int, _option(min=1, help="Jobs that may wait, of one key half as many; more are refused.")
    ] = 1000
    webhook_hosts: Annotated[
        list[str] | None,
        _option(
            metavar="HOST",
            help="Host to which the end of jobs may be told: host, host:port, *.domain or *; repeatable.",
            show_default="none",
        ),
    ] = None
    webhook_secret: Annotated[
        str | None,
        _option(
            metavar="SECRET",
            help="What webhooks are signed with, whsec_ and base64; better given as MMSERVE_WEBHOOK_SECRET.",
        ),
    ] = None
    verbose: Annotated[bool, _option("--verbose", "-v", help="Say more, with one line a request.")] = False


@app.command()
@with_option_groups
def serve(
    server: ServerOptions = ServerOptions(),
    access: AccessOptions = AccessOptions(),  # noqa: B008
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = SERVE_ENGINE,
) -> None:
    """Answer over HTTP: the page at /, documents at /v1/summarize, /v1/ask, /v1/extract and /v1/transcribe, stored
    files and jobs, and OpenAI's chat and completions.

    It listens at once; /ready answers 200 when the model is loaded. SIGTERM or Ctrl-C lets running requests finish;
    jobs go on at the next start.

    \b
    Examples:
      mmserve serve
      mmserve serve --model Qwen/Qwen2.5-1.5B-Instruct --port 9000
      mmserve serve --host 0.0.0.0 --api-keys-file keys.txt
      curl -F file=@report.pdf http://127.0.0.1:8000/v1/summarize
    """
    from mmserve.server.logs import configure_logs
    from mmserve.server.runner import bind, run_server
    from mmserve.server.settings import ServerSettings, default_data_dir

    configure_logs(server.log_format, verbose=server.verbose)
    settings = ServerSettings(
        request_timeout=server.request_timeout,
        queue_timeout=server.queue_timeout,
        upload_timeout=server.upload_timeout,
        shutdown_timeout=server.shutdown_timeout,
        max_upload_bytes=parse_bytes(server.max_upload_size),
        max_files=server.max_files,
        max_concurrent_documents=server.max_concurrent_documents,
        upload_dir=server.upload_dir,
        max_images_per_request=server.max_images_per_request,
        # A picture in base64 takes a third more, and the text comes on top.
        max_json_bytes=parse_bytes(server.max_media_size) * 3 // 2,
        max_media_bytes=parse_bytes(server.max_media_size),
        allowed_media_hosts=tuple(server.allowed_media_hosts or ()),
        otlp_traces_endpoint=server.otlp_traces_endpoint,
        data_dir=server.data_dir or default_data_dir(),
        database_url=server.database_url,
        retention_seconds=parse_duration(server.retention),
        max_stored_bytes=parse_bytes(server.max_stored_size),
        max_queued_jobs=server.max_queued_jobs,
        webhook_hosts=tuple(server.webhook_hosts or ()),
        webhook_secret=server.webhook_secret,
    )
    vision.to_limits()
    with bind(server.host, server.port) as listener:
        settings = replace(settings, access=access.to_settings(server.host, listener.getsockname()[0]))
        if hub.is_demo(engine.model):
            _log.warning(hub.DEMO_NOTICE)
        with started_engine(engine) as client, closing(vision.open_prompts(client, documents.to_limits())) as prompts:
            stopped_by = run_server(client, documents.open_reader(), prompts, settings, listener, say=typer.echo)
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)
