"""The JSON Schema that says what to extract: checked, bounded, and asked about single places of what was extracted."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import extend
from referencing import Registry

from mmserve.errors import RequestError
from mmserve.request import MAX_STRUCTURED_LENGTH, StructuredOutput

Json = Any
Path = tuple[str | int, ...]

_MAX_DEPTH = 32
_MAX_FIELDS, _MAX_FIELD_LENGTH = 100, 64
_MAX_ERRORS = 5
# Objects in a schema: each is checked against the schema of schemas, which takes its time.
_MAX_OBJECTS = 1000
# Schemas that refer to others are followed so often, in all, to check a value: their number may double at each level.
_MAX_FOLLOWED = 20_000
_MAX_FORM_DEPTH = 4
# Longer than what is looked up word for word on a page.
_MAX_STRING = 400
_HAVE_ENDS = frozenset({"maxLength", "enum", "const", "pattern", "format"})
_DATA = frozenset({"enum", "const", "default", "examples"})
_REFERENCES = ("$ref", "$dynamicRef")
_BRANCHES = ("anyOf", "oneOf", "allOf")
_FOLLOWED = ("$ref", *_BRANCHES, "not", "if", "dependentSchemas")


class Schema:
    """A JSON Schema (draft 2020-12) of an object, all of whose references lead to itself."""

    def __init__(self, schema: Mapping[str, Json], *, param: str = "schema", is_checked: bool = False) -> None:
        """Raises `RequestError` (`invalid_schema`) for what is no such schema, too large or too deep."""
        self.root = dict(schema)
        self._param = param
        if not is_checked:
            self._check()

    @classmethod
    def of(cls, given: Mapping[str, Json] | str) -> "Schema":
        """Of a schema, or of its text as JSON."""
        if isinstance(given, Mapping):
            return cls(given)
        if not isinstance(given, str):
            raise _invalid("schema must be a JSON Schema: an object")
        if len(given) > MAX_STRUCTURED_LENGTH:
            raise _invalid(f"schema is {len(given)} characters long, over {MAX_STRUCTURED_LENGTH}")
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise _invalid("schema must be a JSON Schema: an object")
        return cls(schema)

    @classmethod
    def of_fields(cls, names: str) -> "Schema":
        """Of the short form, such as `vendor,date,total`: strings, null where the document does not say."""
        fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else []
        is_fitting = bool(fields) and all(fields) and len(set(fields)) == len(fields) <= _MAX_FIELDS
        if not is_fitting or any(len(name) > _MAX_FIELD_LENGTH for name in fields):
            raise RequestError(
                "invalid_request",
                f"fields must be up to {_MAX_FIELDS} names with commas between, each once and up to"
                f" {_MAX_FIELD_LENGTH} characters long: vendor,date,total",
                param="fields",
            )
        return cls(_object({name: {"type": ["string", "null"]} for name in fields}), param="fields")

    @cached_property
    def text(self) -> str:
        return json.dumps(self.root, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def structured(self) -> StructuredOutput:
        """What holds the answer to it, with an end to every string: a weak model finds none."""
        text = json.dumps(_with_ends(self.root), ensure_ascii=False, separators=(",", ":"))
        return StructuredOutput(kind="json_schema", text=text, param=self._param)

    def errors(self, data: Json) -> list[str]:
        """What does not fit, the first few of it: where, and why."""
        errors = _bounded_validator()(self.root, registry=Registry()).iter_errors(data)
        try:
            first = list(islice(errors, _MAX_ERRORS))
        except RecursionError:
            raise _invalid("schema refers to itself without end", self._param) from None
        except _TooManyFollowed:
            raise _invalid("schema takes too long to check: its references branch too often", self._param) from None
        return [f"{pointer(tuple(error.absolute_path))}: {error.message}" for error in first]

    def for_part(self) -> "Schema":
        """What a part of a document is asked for: the same, but each property may be null, those of objects in it, too.

        What stands in lists is whole, or not there.
        """
        root = self.root
        if isinstance(reference := root.get("$ref"), str) and isinstance(target := self._resolved(reference), dict):
            root = {**target, **{key: value for key, value in root.items() if key != "$ref"}}
        return Schema(self._relaxed(root), param=self._param, is_checked=True)

    def _relaxed(self, schema: Mapping[str, Json]) -> dict[str, Json]:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return dict(schema)
        relaxed = {name: self._or_null(value) for name, value in properties.items()}
        return {**schema, "properties": relaxed, "required": list(relaxed)}

    def _or_null(self, schema: Json) -> dict[str, Json]:
        if isinstance(schema, dict):
            schema = {key: value for key, value in self._relaxed(schema).items() if key != "minItems"}
        return {"anyOf": [schema, {"type": "null"}]}

    def allows_null(self, path: Path) -> bool:
        return any(_allows_null(schema) for schema in self._at(path))

    def requires(self, path: Path) -> bool:
        """Whether the property at `path` must not be left out."""
        return any(path[-1] in schema.get("required", ()) for schema in self._at(path[:-1]))

    @property
    def properties(self) -> list[str]:
        return list(dict.fromkeys(name for schema in self._at(()) for name in schema.get("properties", ())))

    def form(self, path: Path = ()) -> Json:
        """The object to be filled in, with dots for values and one entry for a list."""
        schemas = self._at(path) if len(path) < _MAX_FORM_DEPTH else []
        names = dict.fromkeys(name for schema in schemas for name in schema.get("properties", ()))
        if names:
            return {name: self.form((*path, name)) for name in names}
        return [self.form((*path, 0))] if self.is_list(path) and schemas else "..."

    def is_list(self, path: Path) -> bool:
        return any(schema.get("type") == "array" for schema in self._at(path))

    def is_choice(self, path: Path) -> bool:
        """Whether the value is one of those that the schema lists."""
        return any("enum" in schema or "const" in schema for schema in self._at(path))

    def _at(self, path: Path) -> list[dict[str, Json]]:
        """The schemas that may apply to a place, references followed."""
        schemas = self._expanded([self.root])
        for step in path:
            schemas = self._expanded([child for schema in schemas for child in _children(schema, step)])
        return schemas

    def _expanded(self, schemas: Sequence[Json]) -> list[dict[str, Json]]:
        """Each once, however many references lead to it."""
        found: dict[int, dict[str, Json]] = {}
        waiting = list(reversed(schemas))
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            found[id(schema)] = schema
            if isinstance(reference := schema.get("$ref"), str):
                waiting.append(self._resolved(reference))
            waiting += [branch for key in _BRANCHES for branch in schema.get(key, ())]
        return list(found.values())

    def _resolved(self, reference: str) -> Json:
        place: Json = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            place = place.get(step) if isinstance(place, dict) else None
        return place

    def _check(self) -> None:
        _check_size(self.root, self._param)
        self._check_text()
        try:
            Draft202012Validator.check_schema(self.root)
        except SchemaError as error:
            place = pointer(tuple(error.absolute_path))
            raise _invalid(f"schema is no JSON Schema: {place}: {error.message}", self._param) from None
        for schema in _subschemas(self.root):
            self._check_references(schema)
        if not self.properties:
            raise _invalid('schema must be of an object: {"type": "object", "properties": {...}}', self._param)
        self.errors({})

    def _check_text(self) -> None:
        try:
            json.dumps(self.root, allow_nan=False)
            self.text.encode()
        except ValueError:
            sentence = "schema has NaN, an infinite number, or half a character: JSON has none of them"
            raise _invalid(sentence, self._param) from None
        if len(self.text) > MAX_STRUCTURED_LENGTH:
            raise _invalid(f"schema is {len(self.text)} characters long, over {MAX_STRUCTURED_LENGTH}", self._param)

    def _check_references(self, schema: Mapping[str, Json]) -> None:
        for key in _REFERENCES:
            reference = schema.get(key)
            if isinstance(reference, str) and (key != "$ref" or not _leads_here(reference)):
                raise _invalid(f"schema refers to {reference!r}: take it in under $defs", self._param)
            if isinstance(reference, str) and not isinstance(self._resolved(reference), dict | bool):
                raise _invalid(f"schema has nothing at {reference!r}", self._param)
        if "patternProperties" in schema:
            raise _invalid("schema must name its properties: patternProperties is not taken", self._param)


def _with_ends(schema: Json) -> Json:
    if isinstance(schema, list):
        return [_with_ends(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: child if key in _DATA else _with_ends(child) for key, child in schema.items()}
    types = schema.get("type")
    is_string = types == "string" or (isinstance(types, list) and "string" in types)
    return {"maxLength": _MAX_STRING, **bounded} if is_string and not schema.keys() & _HAVE_ENDS else bounded


def pointer(path: Path) -> str:
    """A JSON pointer: `/items/0/price`."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)


def _object(properties: Mapping[str, Json]) -> dict[str, Json]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _leads_here(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _children(schema: Mapping[str, Json], step: str | int) -> Sequence[Json]:
    if isinstance(step, str):
        properties = schema.get("properties", {})
        return [properties[step]] if step in properties else [schema.get("additionalProperties")]
    prefix = schema.get("prefixItems", ())
    return [prefix[step]] if step < len(prefix) else [schema.get("items")]


def _allows_null(schema: Mapping[str, Json]) -> bool:
    if "enum" in schema or "const" in schema:
        return None in schema.get("enum", ()) or schema.get("const", 0) is None
    types = schema.get("type", "null" if not schema.keys() & {"$ref", *_BRANCHES} else "")
    return types == "null" or (isinstance(types, list) and "null" in types)


class _TooManyFollowed(Exception):
    pass


def _bounded_validator() -> Callable[..., Any]:
    """For one value. Patterns hold by the way the answer is decoded; searching with one could take for ever."""
    num_followed = count(1)

    def bounded(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def follow(*arguments: Any) -> Iterator[Any]:
            if next(num_followed) > _MAX_FOLLOWED:
                raise _TooManyFollowed
            yield from check(*arguments) or ()

        return follow

    checks = {keyword: bounded(Draft202012Validator.VALIDATORS[keyword]) for keyword in _FOLLOWED}
    return extend(Draft202012Validator, {**checks, "pattern": lambda *_: ()})  # type: ignore[no-untyped-call, no-any-return]


def _check_size(root: Json, param: str) -> None:
    """Without recursion, which too deep a schema would end."""
    waiting, num_objects = [(root, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_objects += isinstance(value, dict)
        if num_objects > _MAX_OBJECTS:
            raise _invalid(f"schema has over {_MAX_OBJECTS} objects in it", param)
        if depth > _MAX_DEPTH:
            raise _invalid(f"schema is nested deeper than {_MAX_DEPTH} levels", param)
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(child, depth + 1) for child in children]


def _subschemas(value: Json) -> Iterator[dict[str, Json]]:
    """All objects in a schema, those that are no schemas among them."""
    if isinstance(value, dict):
        yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _subschemas(child)


def _invalid(message: str, param: str = "schema") -> RequestError:
    return RequestError("invalid_schema", message, param=param)
