"""`mmserve.toml`: options that need not be typed each time.

Keys are options without their dashes (`max-model-len = 4096`). At the top they hold for every command that has the
option; in a table named after a command (`[serve]`, `[bench.throughput]`) for that command alone.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import RequestError

FILE_NAME = "mmserve.toml"


@dataclass(frozen=True)
class CommandOptions:
    """The names of a command's options (with underscores), and its subcommands."""

    options: frozenset[str] = frozenset()
    commands: Mapping[str, "CommandOptions"] = field(default_factory=dict)

    def all_options(self) -> Iterator[str]:
        yield from self.options
        for command in self.commands.values():
            yield from command.all_options()


def find_settings(explicit: Path | None) -> Path | None:
    """The file that was named, else `./mmserve.toml`, else that of the user's configuration folder, else None."""
    if explicit is not None:
        return explicit
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = (Path(FILE_NAME), configuration / "mmserve" / FILE_NAME)
    return next((place for place in places if place.is_file()), None)


def read_settings(path: Path, known: CommandOptions) -> dict[str, Any]:
    """Click's `default_map` for the commands of `known`. Raises `RequestError` naming a key that no command has."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("invalid_request", f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RequestError("invalid_request", f"{path} is not valid TOML: {error}") from None
    unknown = list(_unknown_keys(table, known))
    if unknown:
        raise RequestError("invalid_request", f"{path}: no option is called {', '.join(unknown)}")
    return _default_map(table, known, {})


def _unknown_keys(table: Mapping[str, Any], known: CommandOptions, prefix: str = "") -> Iterator[str]:
    names = frozenset(known.all_options())
    for key, value in table.items():
        if key in known.commands and isinstance(value, dict):
            yield from _unknown_keys(value, known.commands[key], f"{prefix}{key}.")
        elif _option_name(key) not in names or isinstance(value, dict):
            yield prefix + key


def _default_map(table: Mapping[str, Any], known: CommandOptions, outer: Mapping[str, Any]) -> dict[str, Any]:
    values = {**outer, **{_option_name(key): _plain(value) for key, value in table.items()}}
    defaults: dict[str, Any] = {name: values[name] for name in known.options if name in values}
    for name, command in known.commands.items():
        inner = table.get(name)
        defaults[name] = _default_map(inner if isinstance(inner, dict) else {}, command, values)
    return defaults


def _option_name(key: str) -> str:
    return key.replace("-", "_")


def _plain(value: Any) -> Any:
    """Numbers as they would be typed, so that the option itself decides what they mean."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else str(value)
