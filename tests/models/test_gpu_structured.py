"""Answers with a form on a card: the CPU's greedy tokens, and forms that hold when tokens are drawn."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_driver import engine_config, greedy, run_requests
from reference_models import save_reference_model

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [[11, 52, 93, 134], [7, 8, 9, 10, 11, 12, 13], [300] * 20]
SCHEMA = {
    "type": "object",
    "properties": {
        "vendor": {"type": "string", "maxLength": 8},
        "total": {"type": "integer", "minimum": -50, "maximum": 5000},
        "paid": {"type": "boolean"},
    },
    "required": ["vendor", "total", "paid"],
    "additionalProperties": False,
}
FORM = StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"))


def on_card(folder: Path, *, eager: bool) -> Engine:
    return Engine(replace(engine_config(folder), device="cuda", enforce_eager=eager))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_with_and_without_a_form_equal_the_cpus(folder: Path, eager: bool) -> None:
    requests = [
        EngineRequest(f"{kind}{i}", prompt, greedy(60, structured=form, logit_bias={5: 1.0}) if form else greedy(60))
        for i, prompt in enumerate(PROMPTS)
        for kind, form in (("plain", None), ("form", FORM))
    ]
    expected = run_requests(Engine(engine_config(folder)), requests)
    assert len({len(answer) for answer in expected}) > 1
    assert run_requests(on_card(folder, eager=eager), requests) == expected


def test_drawn_tokens_follow_the_form(folder: Path) -> None:
    tokenizer = open_checkpoint(str(folder)).tokenizer()
    choices: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 2},
        {"min_p": 0.3},
        {"top_k": 50, "top_p": 0.5, "presence_penalty": 1.0},
    ]
    requests = [
        EngineRequest(f"{i}/{j}", PROMPTS[j % 3], SamplingParams(max_tokens=200, structured=FORM, **fields), seed=j)
        for i, fields in enumerate(choices)
        for j in range(12)
    ]
    plain = EngineRequest("plain", PROMPTS[0], greedy(40))
    *answers, beside = run_requests(on_card(folder, eager=False), [*requests, plain])
    assert [beside] == run_requests(on_card(folder, eager=False), [plain])
    texts = [tokenizer.decode(answer) for answer in answers]
    assert len(set(texts)) > 12
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
