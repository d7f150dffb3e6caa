"""Digests of what decides a result: equal for equal values, whatever their types are called."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any


def digest_of(*values: Any) -> str:
    """SHA-256, in hexadecimal. Dataclasses, mappings (in their order), sequences and plain values may be nested.

    Raises `TypeError` for anything else: a digest that changes from run to run would find nothing.
    """
    return hashlib.sha256(json.dumps(_plain(values)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [[field.name, _plain(getattr(value, field.name))] for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"a {type(value).__name__} has no digest")
