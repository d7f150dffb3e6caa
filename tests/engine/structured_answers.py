"""Answers that must have a form, on an `Engine` without a client: schemas, and what becomes of requests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_driver import check_invariants

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest, RequestFailure
from mmserve.request import FinishReason, SamplingParams, StructuredKind, StructuredOutput
from mmserve.weights.tokenizer import Tokenizer

PROMPTS = [[11, 52, 93, 134], [7, 8, 9, 10, 11, 12, 13], [300] * 20]
TEXT = {"type": "string", "maxLength": 8}
INVOICE = {
    "type": "object",
    "properties": {
        "vendor": TEXT,
        "date": {"type": "string", "format": "date"},
        "paid": {"type": ["boolean", "null"]},
        "total": {"type": "integer", "minimum": -50, "maximum": 5000},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
        },
    },
    "required": ["vendor", "date", "paid", "total", "lines"],
    "additionalProperties": False,
}
INVOICE["properties"]["lines"]["items"]["additionalProperties"] = False  # type: ignore[index]
SCHEMAS: dict[str, dict[str, Any]] = {
    "invoice": INVOICE,
    "enum": {"enum": ["yes", "no", 7, None, {"a": [1, "é"]}]},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 1}, "maxItems": 3}]},
    "reference": {
        "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 99}},
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "minItems": 2,
        "maxItems": 4,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
}


def structured(kind: StructuredKind, text: str = "", **fields: Any) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=text, **fields)


def of_schema(schema: dict[str, Any], **fields: Any) -> StructuredOutput:
    return structured("json_schema", json.dumps(schema), **fields)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    failure: RequestFailure | None = None


def run(engine: Engine, *requests: tuple[Sequence[int], SamplingParams], seed: int = 0) -> list[Answer]:
    """All are offered at once, each with a seed of its own."""
    answers = {str(i): Answer() for i in range(len(requests))}
    for i, (prompt, params) in enumerate(requests):
        assert engine.add_request(EngineRequest(str(i), list(prompt), params, seed=seed + i)) is None
    while engine.has_work:
        step(engine, answers)
    return list(answers.values())


def step(engine: Engine, answers: dict[str, Answer]) -> None:
    for output in engine.step().outputs:
        answer = answers[output.request_id]
        answer.token_ids += output.token_ids
        answer.finish_reason, answer.failure = output.finish_reason, output.failure
        answer.stop_token_id = output.stop_token_id
    check_invariants(engine.scheduler)


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    ids = answer.token_ids[:-1] if answer.stop_token_id is not None else answer.token_ids
    return tokenizer.decode(ids, skip_special_tokens=False)
