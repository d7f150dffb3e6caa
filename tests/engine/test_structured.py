"""Answers that must have a form, of a model of random weights: what holds, what is refused, and the neighbours."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_driver import engine_config, greedy, run_to_end
from reference_models import save_reference_model
from structured_answers import INVOICE, PROMPTS, SCHEMAS, TEXT, Answer, of_schema, run, step, structured, text_of

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.engine.structured import GrammarCompiler
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(engine_config(folder))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_checkpoint(str(folder)).tokenizer()


# Answers


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_follows_its_schema(engine: Engine, tokenizer: Tokenizer, name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=400, structured=of_schema(SCHEMAS[name]))
    answers = run(engine, *[(PROMPTS[i % 3], params) for i in range(8)])
    assert [answer.finish_reason for answer in answers] == ["stop"] * 8
    for answer in answers:
        jsonschema.validate(json.loads(text_of(tokenizer, answer)), SCHEMAS[name])


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (structured("regex", r"[0-9]{2}\.[a-f]{1,3}"), r"[0-9]{2}\.[a-f]{1,3}"),
        (structured("choice", json.dumps(["invoice", "inv", 'a "letter"\n', "<|im_end|>"])), None),
        (structured("grammar", 'root ::= "(" root ")" | [xy]\n'), r"\(*[xy]\)*"),
        (structured("grammar", 'start: "k" NUMBER\nNUMBER: /[0-9]+/\n'), r"k[0-9]+"),
    ],
    ids=["regex", "choice", "gbnf", "lark"],
)
def test_other_forms(engine: Engine, tokenizer: Tokenizer, form: StructuredOutput, pattern: str | None) -> None:
    answers = run(engine, *[(PROMPTS[0], SamplingParams(max_tokens=200, structured=form)) for _ in range(12)])
    texts = [text_of(tokenizer, answer) for answer in answers]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert len(set(texts)) > 1
    assert all(re.fullmatch(pattern, text) if pattern else text in json.loads(form.text) for text in texts)


def test_any_object(engine: Engine, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=400, structured=structured("json_object"))
    answers = run(engine, *[(PROMPTS[0], params) for _ in range(12)])
    whole = [text_of(tokenizer, answer) for answer in answers if answer.finish_reason == "stop"]
    assert len(whole) >= 3
    assert all(isinstance(json.loads(text), dict) for text in whole)


def test_no_bias_leads_out_of_the_form_or_into_blanks(engine: Engine, tokenizer: Tokenizer) -> None:
    blanks = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isspace()]
    wanted = dict.fromkeys([*blanks, *tokenizer.eos_token_ids], 100.0)
    unwanted = {tokenizer.encode(text)[0]: -100.0 for text in '{}":'}
    params = SamplingParams(
        max_tokens=400,
        logit_bias=wanted | unwanted,
        stop_token_ids=tokenizer.eos_token_ids,
        structured=of_schema(INVOICE),
    )
    for answer in run(engine, *[(PROMPTS[i % 3], params) for i in range(6)]):
        text = text_of(tokenizer, answer)
        jsonschema.validate(json.loads(text), INVOICE)
        outside_strings = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert not re.search(r"\s\s|[\n\r\t]", outside_strings)


def test_penalties_see_the_tokens_and_the_form_still_holds(engine: Engine, tokenizer: Tokenizer) -> None:
    form = structured("regex", "[ab]{30}")
    params = SamplingParams(max_tokens=60, presence_penalty=2.0, repetition_penalty=3.0, top_k=3, structured=form)
    (answer,) = run(engine, (PROMPTS[0], params))
    assert re.fullmatch("[ab]{30}", text_of(tokenizer, answer))


def test_an_answer_that_is_cut_says_so(engine: Engine, tokenizer: Tokenizer) -> None:
    (answer,) = run(engine, (PROMPTS[0], SamplingParams(max_tokens=6, structured=of_schema(INVOICE))))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 6)
    with pytest.raises(ValueError):
        json.loads(text_of(tokenizer, answer))


def test_one_that_is_complete_with_its_last_token_was_not_cut(engine: Engine) -> None:
    (answer,) = run(engine, (PROMPTS[0], greedy(1, structured=structured("choice", '["a"]'))))
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", None)


# Where an answer ends


def test_it_ends_where_nothing_can_follow_whatever_else_is_wished(engine: Engine, tokenizer: Tokenizer) -> None:
    params = greedy(50, min_tokens=20, structured=structured("choice", '["yes", "no"]'))
    (answer,) = run(engine, (PROMPTS[0], params))
    assert params.ignore_eos
    assert text_of(tokenizer, answer) in ("yes", "no")
    assert answer.finish_reason == "stop"


def test_where_it_may_end_or_go_on_min_tokens_and_ignore_eos_decide(engine: Engine, tokenizer: Tokenizer) -> None:
    wants_end = dict.fromkeys(tokenizer.eos_token_ids, 100.0)

    def length(**fields: Any) -> int:
        params = SamplingParams(max_tokens=40, logit_bias=wants_end, structured=structured("regex", "a{1,9}"), **fields)
        (answer,) = run(engine, (PROMPTS[0], params))
        assert answer.finish_reason == "stop"
        text = text_of(tokenizer, answer)
        assert re.fullmatch("a{1,9}", text)
        return len(text)

    assert length() == 1
    assert 4 <= length(min_tokens=4) < 9
    assert length(ignore_eos=True) == 9


# Neighbours, and the scheduler's ways


def test_neighbours_are_answered_as_if_alone(engine: Engine) -> None:
    alone = [run_to_end(engine, [prompt], greedy(24))[0] for prompt in PROMPTS]
    form = SamplingParams(max_tokens=100, structured=of_schema(INVOICE))
    (sampled,) = run(engine, (PROMPTS[1], SamplingParams(max_tokens=24, ignore_eos=True)), seed=5)
    mixed = run(
        engine,
        (PROMPTS[0], greedy(24)),
        (PROMPTS[0], form),
        (PROMPTS[1], greedy(24)),
        (PROMPTS[1], form),
        (PROMPTS[2], greedy(24)),
        (PROMPTS[1], SamplingParams(max_tokens=24, ignore_eos=True)),
    )
    assert [mixed[i].token_ids for i in (0, 2, 4)] == alone
    (again,) = run(engine, (PROMPTS[1], SamplingParams(max_tokens=24, ignore_eos=True)), seed=5)
    assert mixed[5].token_ids == sampled.token_ids == again.token_ids


SEEDED = [(prompt, SamplingParams(max_tokens=60, structured=of_schema(INVOICE))) for prompt in PROMPTS * 2]


@pytest.fixture(scope="module")
def seeded_tokens(folder: Path) -> list[list[int]]:
    """Of each request alone."""
    engine = Engine(engine_config(folder, prefix_caching=False))
    return [run(engine, request, seed=i)[0].token_ids for i, request in enumerate(SEEDED)]


def tokens(engine: Engine) -> list[list[int]]:
    return [answer.token_ids for answer in run(engine, *SEEDED)]


def test_after_preemption_the_form_goes_on_where_it_was(folder: Path, seeded_tokens: list[list[int]]) -> None:
    engine = Engine(engine_config(folder, num_blocks=20, block_size=8, prefix_caching=False))
    assert tokens(engine) == seeded_tokens
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_in_chunks_from_the_prefix_cache_and_with_a_step_ahead(
    folder: Path, seeded_tokens: list[list[int]], is_ahead: bool
) -> None:
    config = replace(engine_config(folder, block_size=4, max_num_batched_tokens=7), async_scheduling=is_ahead)
    engine = Engine(config)
    assert tokens(engine) == seeded_tokens
    assert tokens(engine) == seeded_tokens
    assert engine.scheduler.stats().prefix_cache_hits > 0


@pytest.fixture
def held_compiler(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is compiled before the event is set."""
    released, submit = threading.Event(), GrammarCompiler._compile

    def wait(compiler: GrammarCompiler, *arguments: Any) -> Any:
        assert released.wait(60)
        return submit(compiler, *arguments)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    yield released
    released.set()


def test_others_pass_a_request_whose_form_is_being_compiled(engine: Engine, held_compiler: threading.Event) -> None:
    answers = {"slow": Answer(), "fast": Answer()}
    slow = SamplingParams(max_tokens=30, structured=structured("regex", "[ab]{3}"))
    assert engine.add_request(EngineRequest("slow", PROMPTS[0], slow)) is None
    assert engine.add_request(EngineRequest("fast", PROMPTS[1], greedy(12))) is None
    while answers["fast"].finish_reason is None:
        step(engine, answers)
    assert answers["slow"] == Answer()
    for _ in range(3):
        step(engine, answers)
    assert engine.has_work
    held_compiler.set()
    while engine.has_work:
        step(engine, answers)
    assert answers["slow"].finish_reason == "stop"


def test_a_request_that_leaves_while_it_is_compiled_is_forgotten(
    engine: Engine, held_compiler: threading.Event
) -> None:
    params = SamplingParams(structured=structured("regex", "[ab]{4}"))
    for name in ("a", "b"):
        assert engine.add_request(EngineRequest(name, PROMPTS[0], params)) is None
    for name in ("a", "b"):
        output = engine.abort(name)
        assert output is not None
        assert output.finish_reason == "abort"
    assert not engine.has_work
    held_compiler.set()
    assert run(engine, (PROMPTS[0], params))[0].finish_reason == "stop"
    assert not engine._compiling


def test_a_request_that_leaves_in_the_middle_owns_nothing(engine: Engine) -> None:
    params = SamplingParams(structured=of_schema(INVOICE))
    assert engine.add_request(EngineRequest("a", PROMPTS[0], params)) is None
    answers = {"a": Answer()}
    while not answers["a"].token_ids:
        step(engine, answers)
    assert engine.abort("a") is not None
    assert not engine.has_work
    assert engine.scheduler.pool.num_referenced == 0


# Refusals

HUGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}
REFUSED: dict[str, StructuredOutput] = {
    "unknown type": of_schema({"type": "banana"}),
    "not a schema": of_schema({"type": "object", "properties": 5}),
    "remote reference": of_schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "local file": of_schema({"$ref": "file:///etc/passwd"}),
    "unsatisfiable enum": of_schema({"enum": []}),
    "unsatisfiable numbers": of_schema({"type": "integer", "minimum": 3, "maximum": 2}),
    "nothing but itself": of_schema({"$ref": "#"}),
    "cannot be enforced": of_schema({"type": "array", "uniqueItems": True}),
    "huge": of_schema(HUGE),
    "product of alternatives": of_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": TEXT}} for j in range(6)]} for i in range(8)]}
    ),
    "a state for every remainder": of_schema({"type": "integer", "multipleOf": 1_234_567}),
    "common multiples": of_schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (991, 997)]}),
    "small but of many digits": of_schema({"type": "number", "multipleOf": 2.0**-13}),
    "numbers beyond floats": structured("json_schema", '{"type": "number", "multipleOf": 1' + "0" * 400 + "}"),
    "patterns that all have to fit": of_schema(
        {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(30)]}
    ),
    "patterns one behind the other": of_schema(
        {"$defs": {"d30": TEXT} | {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f".*{i}.*"} for i in range(30)}}
        | {"$ref": "#/$defs/d0"}
        | {"type": "string"}
    ),
    "half a character": structured("regex", "\ud800"),
    "regex": structured("regex", "(a"),
    "looking around": structured("regex", "a(?=b)"),
    "grammar": structured("grammar", "start: nothing\n"),
    "no grammar": structured("grammar", "(((("),
    "deep grammar": structured("grammar", "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
    "a schema inside": structured("grammar", 'start: %json {"type": "integer", "multipleOf": 1234567}\n'),
    "endless without a start": structured("grammar", "start: start\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_cannot_be_followed_is_refused_alone(engine: Engine, name: str) -> None:
    form = replace(REFUSED[name], param="response_format")
    (alone,) = run_to_end(engine, [PROMPTS[1]], greedy(8))
    refused, neighbour = run(engine, (PROMPTS[0], SamplingParams(structured=form)), (PROMPTS[1], greedy(8)))
    assert refused.failure is not None
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert (refused.failure.code, refused.failure.param) == ("invalid_schema", "response_format")
    assert refused.failure.message.startswith("response_format ")
    assert len(refused.failure.message) < 500
    assert "NoExtension" not in refused.failure.message
    assert neighbour.token_ids == alone
    assert engine.scheduler.pool.num_referenced == 0


def test_what_cannot_be_enforced_may_be_left_to_the_caller(engine: Engine, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "maximum": 9, "minimum": 0},
        "maxItems": 3,
        "uniqueItems": True,
    }
    (answer,) = run(engine, (PROMPTS[0], SamplingParams(max_tokens=50, structured=of_schema(schema, lenient=True))))
    assert isinstance(json.loads(text_of(tokenizer, answer)), list)


def test_one_that_turns_out_to_lead_nowhere_ends_with_an_error(engine: Engine) -> None:
    """Too much for the parser, but not before the first token."""
    form = structured("grammar", 'start: "a" start\n', param="guided_grammar")
    (alone,) = run_to_end(engine, [PROMPTS[1]], greedy(8))
    stuck, neighbour = run(engine, (PROMPTS[0], greedy(8, structured=form)), (PROMPTS[1], greedy(8)))
    assert stuck.failure is not None
    assert (stuck.failure.code, stuck.failure.param) == ("invalid_schema", "guided_grammar")
    assert neighbour.token_ids == alone


def test_a_fault_of_the_compiler_is_an_error_of_the_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("secret schema")

    monkeypatch.setattr(GrammarCompiler, "_compile", fail)
    failed, neighbour = run(
        engine, (PROMPTS[0], SamplingParams(structured=structured("regex", "[ab]{7}"))), (PROMPTS[1], greedy(3))
    )
    assert failed.failure is not None
    assert failed.failure.code == "internal_error"
    assert "secret" not in failed.failure.message
    assert neighbour.finish_reason == "length"
