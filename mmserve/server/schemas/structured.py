"""The fields of chat and text completions that say which form an answer has to have: OpenAI's, and vLLM's."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.errors import RequestError
from mmserve.request import StructuredKind, StructuredOutput
from mmserve.server.schemas.common import RequestModel


class NamedSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(None, description="Accepted and ignored.")
    description: str | None = Field(None, description="Accepted and ignored.")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema; any object if absent.")
    strict: bool | None = Field(
        False, description="Refuse a schema that cannot be enforced to the last word, such as one with uniqueItems."
    )


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def constraint(self) -> StructuredOutput | None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            verb = "needs a" if self.type == "json_schema" else "takes no"
            sentence = f"response_format of type {self.type} {verb} json_schema."
            raise RequestError("invalid_request", sentence, param="response_format")
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return StructuredOutput(kind="json_object", param="response_format")
        text = _as_text(self.json_schema.json_schema, "response_format")
        lenient = not self.json_schema.strict
        return StructuredOutput(kind="json_schema", text=text, lenient=lenient, param="response_format")


class StructuredOutputs(RequestModel):
    """One of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json", description="JSON Schema, or its text.")
    regex: str | None = Field(None, description="A regular expression of the whole answer.")
    choice: list[str] | None = Field(None, description="The answer is one of these.")
    grammar: str | None = Field(None, description="A grammar in Lark's or GBNF's notation.")
    json_object: bool | None = Field(None, description="Any JSON object.")

    def constraint(self) -> StructuredOutput:
        values: dict[StructuredKind, Any] = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = [_constraint(kind, value, "structured_outputs") for kind, value in values.items() if value is not None]
        if self.json_object:
            given.append(StructuredOutput(kind="json_object", param="structured_outputs"))
        if len(given) != 1:
            sentence = (
                f"structured_outputs takes one of json, regex, choice, grammar and json_object, not {len(given)}."
            )
            raise RequestError("invalid_request", sentence, param="structured_outputs")
        return given[0]


class StructuredFields(BaseModel):
    """At most one of these may be given."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with the schema that the answer follows."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="As vLLM has it.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")

    def structured_output(self) -> StructuredOutput | None:
        """Raises `RequestError` for more than one, and (`invalid_schema`) for what is no schema."""
        given = [form for form in (self.response_format, self.structured_outputs) if form is not None]
        constraints = [constraint for form in given if (constraint := form.constraint()) is not None]
        guided: dict[str, tuple[StructuredKind, Any]] = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        constraints += [_constraint(kind, value, name) for name, (kind, value) in guided.items() if value is not None]
        if len(constraints) > 1:
            first, second = constraints[0].param, constraints[1].param
            sentence = f"{first} and {second} are both given: an answer can have one form, leave one of them out."
            raise RequestError("invalid_request", sentence, param=second)
        return constraints[0] if constraints else None


def _constraint(kind: StructuredKind, value: Any, param: str) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=value if isinstance(value, str) else _as_text(value, param), param=param)


def _as_text(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError("invalid_schema", f"{param} is nested too deeply.", param=param) from None
