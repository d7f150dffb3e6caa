import json
from typing import Any

import pytest

from mmserve.errors import RequestError
from mmserve.pipelines.schemas import Schema, pointer

INVOICE: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "money": {"type": ["number", "null"]},
        "item": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "price": {"$ref": "#/$defs/money"}},
            "required": ["name"],
        },
    },
    "properties": {
        "vendor": {"type": "string"},
        "currency": {"enum": ["EUR", "GBP", None]},
        "total": {"$ref": "#/$defs/money"},
        "due": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "items": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/item"}},
        "buyer": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["vendor", "total", "items"],
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("no JSON", "is not JSON"),
        ("[1]", "an object"),
        (7, "an object"),
        ("[" * 100_000, "is not JSON"),
        ("x" * 200_000, "characters long"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "no JSON Schema: /properties/a/type"),
        ({"type": "array", "items": {"type": "string"}}, "must be of an object"),
        ({"type": "object"}, "must be of an object"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "refers to 'https://example.com/a.json'"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "refers to"),
        ({"properties": {"a": {"$dynamicRef": "#a"}}}, "refers to"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "has nothing at"),
        ({"properties": {"a": {}}, "allOf": [{"$ref": "#"}]}, "without end"),
        ({"properties": {"a": {}}, "patternProperties": {"^(a+)+$": {}}}, "patternProperties"),
        (nested(40), "nested deeper"),
    ],
)
def test_what_is_no_schema_that_can_be_taken_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        Schema.of(schema)
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "schema")


def test_a_schema_is_the_same_as_its_text() -> None:
    assert Schema.of(json.dumps(INVOICE)).root == Schema.of(INVOICE).root
    assert Schema.of(INVOICE).properties == ["vendor", "currency", "total", "due", "items", "buyer"]


def test_references_that_meet_again_and_again_are_followed_once() -> None:
    names = [f"n{number}" for number in range(30)]
    definitions = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    schema = Schema.of({"$defs": definitions, "properties": {"a": {"$ref": "#/$defs/n0"}}})
    assert not schema.is_choice(("a",))


def test_the_short_form_makes_strings_that_may_be_null() -> None:
    schema = Schema.of_fields(" vendor, invoice date ,total")
    assert schema.properties == ["vendor", "invoice date", "total"]
    assert schema.errors({"vendor": "A", "invoice date": None, "total": None}) == []
    assert schema.errors({"vendor": "A", "total": 5, "invoice date": None}) != []
    assert schema.errors({"vendor": "A"}) != []


@pytest.mark.parametrize("names", ["", " , ", "a,,b", "a,b,a", "x" * 65, ",".join(map(str, range(101))), 5])
def test_what_is_no_list_of_names_is_refused(names: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Schema.of_fields(names)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "fields")


def test_the_form_shows_what_is_to_be_filled_in() -> None:
    assert Schema.of(INVOICE).form() == {
        "vendor": "...",
        "currency": "...",
        "total": "...",
        "due": "...",
        "items": [{"name": "...", "price": "..."}],
        "buyer": {"name": "..."},
    }
    tree = Schema.of({"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}})
    assert tree.form() == {"children": [{"children": ["..."]}]}


def test_places_are_asked_for_null_for_need_and_for_choice() -> None:
    schema = Schema.of(INVOICE)
    nullable = [("currency",), ("total",), ("due",), ("items", 0, "price")]
    assert all(schema.allows_null(path) for path in nullable)
    assert not any(schema.allows_null(path) for path in [("vendor",), ("items", 3, "name"), ("buyer", "name")])
    needed = {
        path for path in [("vendor",), ("due",), ("items", 0, "name"), ("items", 0, "price")] if schema.requires(path)
    }
    assert needed == {("vendor",), ("items", 0, "name")}
    assert schema.is_choice(("currency",))
    assert not schema.is_choice(("vendor",))
    assert schema.is_list(("items",))


def test_a_part_may_leave_everything_open_but_what_stands_in_lists() -> None:
    part = Schema.of(INVOICE).for_part()
    nothing = dict.fromkeys(INVOICE["properties"])
    assert part.errors(nothing) == []
    assert part.errors({**nothing, "items": [], "buyer": {"name": None}}) == []
    assert part.errors({**nothing, "items": [{"price": 5}]}) != []
    assert part.errors({"vendor": "A"}) != []
    assert Schema.of(INVOICE).errors(nothing) != []


def test_a_part_may_leave_open_what_the_root_refers_to() -> None:
    schema = Schema.of({"$ref": "#/$defs/invoice", "$defs": {**INVOICE["$defs"], "invoice": INVOICE}})
    assert schema.errors(dict.fromkeys(INVOICE["properties"])) != []
    assert schema.for_part().errors(dict.fromkeys(INVOICE["properties"])) == []


def test_errors_say_where_and_a_pattern_is_left_to_decoding() -> None:
    schema = Schema.of({"properties": {"a/b": {"type": "object", "properties": {"c": {"pattern": "^(a+)+$"}}}}})
    assert schema.errors({"a/b": {"c": "a" * 40 + "!"}}) == []
    assert schema.errors({"a/b": 1})[0].startswith("/a~1b: 1 is not")
    assert pointer(("a/b", 0, "c~d")) == "/a~1b/0/c~0d"


def test_strings_that_could_go_on_for_ever_end_in_what_the_engine_is_told() -> None:
    told = json.loads(Schema.of(INVOICE).structured.text)
    assert told["properties"]["vendor"] == {"type": "string", "maxLength": 400}
    assert "maxLength" not in told["properties"]["due"]["anyOf"][0]
    assert "maxLength" not in told["properties"]["total"]
    assert told["$defs"]["item"]["properties"]["name"]["maxLength"] == 400
    assert Schema.of(INVOICE).structured.kind == "json_schema"
