"""Renders chat templates in Jinja's sandbox, keeping apart the control tokens that the template wrote from look-alikes.

A template comes with a checkpoint and is not trusted; what users write in messages is trusted even less. Text in a
message that spells a control token (`<|im_end|>`) is wrapped in markers before rendering, so that the encoder can tell
it from a real one afterwards.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmserve.errors import RequestError


@dataclass(frozen=True)
class RenderedPiece:
    """A stretch of a rendered chat; `is_text` if control tokens that it spells are to stay text."""

    text: str
    is_text: bool


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], control_tokens: Iterable[str], variables: Mapping[str, Any]
) -> list[RenderedPiece]:
    """The rendered chat in pieces. `RequestError` (`invalid_request`) with the template's own complaint if it fails."""
    markers = _Markers(control_tokens)
    plain_messages = [_plain_message(message, as_parts=not _takes_strings(template)) for message in messages]
    try:
        rendered = _compile(template).render(
            messages=markers.mark(plain_messages),
            **{
                name: markers.mark(value) if name in ("tools", "documents") else value
                for name, value in variables.items()
            },
        )
    except Exception as error:  # a template is a program: anything may go wrong in it
        raise RequestError("invalid_request", f"the model's chat template refused the messages: {error}") from None
    return markers.split(rendered)


class _Markers:
    """Wraps control tokens in user text, between numbers that no text can guess, and finds them again."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in control_tokens if token.strip()), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # Digits alone, so that no filter of a template (tojson, upper, escape) changes them.
        self._start, self._end = (str(10**24 + secrets.randbelow(10**24)) for _ in range(2))
        marker = f"{self._start}|{self._end}"
        self._marked = re.compile(f"{self._start}((?:(?!{marker}).)*){self._end}|{marker}", re.DOTALL)

    def mark(self, value: Any) -> Any:
        """`value` with every string in it marked; dictionary keys are left alone."""
        if isinstance(value, str):
            return self._tokens.sub(lambda match: f"{self._start}{match[0]}{self._end}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def split(self, rendered: str) -> list[RenderedPiece]:
        """Markers that the template tore apart vanish, but the text around them still does not join."""
        pieces = self._marked.split(rendered)
        return [RenderedPiece(piece, is_text=i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def _plain_message(message: Mapping[str, Any], *, as_parts: bool) -> dict[str, Any]:
    """Content as one text where that is all there is and the template takes it, else as its parts."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        parts = [_plain_part(part) for part in content]
        has_images = any(part["type"] == "image" for part in parts)
        plain["content"] = parts if as_parts or has_images else "\n".join(part["text"] for part in parts)
    elif as_parts and isinstance(content, str):
        plain["content"] = [{"type": "text", "text": content}]
    return plain


def _plain_part(part: Any) -> dict[str, str]:
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if part.get("type") == "image":
            return {"type": "image"}
    raise RequestError("invalid_request", "message content must be a string, or parts of type text and image")


@lru_cache(maxsize=8)
def _takes_strings(template: str) -> bool:
    """Templates of some vision-language models pass over, without a word, a content that is no list of parts."""
    probe = "7263580149"
    try:
        return probe in _compile(template).render(messages=[{"role": "user", "content": probe}])
    except Exception:  # the template that refuses a probe may take real messages, and says what it misses otherwise
        return True


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for serving, it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
