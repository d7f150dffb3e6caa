"""Results from their JSON: what a task's `to_dict` wrote becomes the dataclass again, and so its Markdown."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mmserve.errors import HTTP_STATUS, MMServeError
from mmserve.pipelines.tasks import TASKS, TaskName, TaskResult

T = TypeVar("T")


def result_type(task: TaskName) -> type[TaskResult]:
    kind: type[TaskResult] = get_type_hints(TASKS[task].run)["return"]
    return kind


def from_dict(kind: type[T], value: Mapping[str, Any]) -> T:
    """A dataclass whose fields have the names of the keys (`is_valid` may be `valid`); other keys are passed over.

    Raises `ValueError` where something is missing or of another form.
    """
    try:
        built: T = _built(kind, value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no {kind.__name__}: {error}") from None
    return built


def _built(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        kinds = [arg for arg in get_args(kind) if arg is not NoneType]
        return _built(kinds[0], value) if len(kinds) == 1 and value is not None else value
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item = get_args(kind)[0]
        return tuple(_built(item, one) for one in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        keys = {field.name: _key(field.name, value) for field in dataclasses.fields(kind)}
        return kind(**{name: _built(hints[name], value[key]) for name, key in keys.items() if key in value})
    if isinstance(kind, type) and issubclass(kind, MMServeError):
        code = value["code"]
        return kind(code if code in HTTP_STATUS else "internal_error", value["message"])
    return value


def _key(name: str, value: Mapping[str, Any]) -> str:
    return name if name in value else name.removeprefix("is_")
