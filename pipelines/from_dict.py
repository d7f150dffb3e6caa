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
    """A dataclass whose fields have the names of the keys; other keys are passed over.

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
        return None if value is None else _built(next(arg for arg in get_args(kind) if arg is not NoneType), value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item = get_args(kind)[0]
        return tuple(_built(item, one) for one in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.name in value]
        return kind(**{name: _built(hints[name], value[name]) for name in names})
    if isinstance(kind, type) and issubclass(kind, MMServeError):
        code = value["code"]
        return kind(code if code in HTTP_STATUS else "internal_error", value["message"])
    return value
