"""What is compiled and kept, which tokens a matcher allows, and what is wrong before anything is compiled."""

import json
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import save_reference_tokenizer
from structured_answers import INVOICE, of_schema, structured

from mmserve.engine.structured import GrammarCompiler, Matcher, forbid_tokens, token_masks
from mmserve.errors import RequestError
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.request import Sequence as EngineSequence
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.model_files import read_tokenizer
from mmserve.weights.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_reference_tokenizer(folder)
    return read_tokenizer(folder)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def test_the_same_form_is_compiled_once_and_the_oldest_is_forgotten(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, capacity=2)

    def compile_all(*patterns: str) -> int:
        futures: list[Future[Matcher]] = [compiler.submit(structured("regex", pattern)) for pattern in patterns]
        assert len({id(future.result()) for future in futures}) == len(patterns)
        return compiler.num_compiled

    assert compile_all("a", "a", "a") == 1
    assert compile_all("b", "a", "c") == 3
    assert compile_all("a", "c") == 3
    assert compile_all("b") == 4


def test_matchers_of_one_form_do_not_share_their_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = (compiler.submit(structured("regex", "ab")).result() for _ in range(2))
    first.accept(tokenizer.encode("a")[0])
    with pytest.raises(RequestError, match="any further"):
        second.accept(tokenizer.encode("b")[0])
    first.accept(tokenizer.encode("b")[0])
    assert first.is_complete


def allowed_ids(matcher: Matcher) -> set[int]:
    (mask,) = token_masks([with_matcher(matcher)])
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def with_matcher(matcher: Matcher) -> EngineSequence:
    return EngineSequence("a", [1], SamplingParams(), matcher=matcher)


def test_masks_of_many_are_those_of_each(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matchers = [compiler.submit(structured("regex", f"[{letters}]")).result() for letters in ("ab", "c", "xyz")]
    masks = token_masks([with_matcher(matcher) for matcher in matchers])
    each = [set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()) for mask in masks]
    assert each == [{tokenizer.encode(letter)[0] for letter in letters} for letters in ("ab", "c", "xyz")]
    assert each == [allowed_ids(matcher) for matcher in matchers]


def test_forbidden_tokens_leave_a_mask_unless_they_are_all_of_it() -> None:
    mask = np.array([0b1000_0010, 0b1], dtype=np.uint8)
    forbid_tokens(mask, (7, 8, 3))
    assert mask.tolist() == [0b10, 0]
    forbid_tokens(mask, (1,))
    assert mask.tolist() == [0b10, 0]


def test_special_tokens_are_no_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A string may spell one, but not be one."""
    matcher = compiler.submit(structured("json_schema", '{"type": "string"}')).result()
    matcher.accept(tokenizer.encode('"')[0])
    assert not allowed_ids(matcher) & set(tokenizer.special_token_ids)


def test_the_embedded_models_tokenizer(smollm2_path: Path) -> None:
    """A vocabulary of 49,152 out of a GGUF file, with logits for more."""
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size + 40, tokenizer.eos_token_ids)
    value = {"vendor": 'Müller "&" 東京', "date": "2024-03-12", "paid": None, "total": 12, "lines": [{"name": "x\ty"}]}
    schema = json.loads(json.dumps(INVOICE).replace('"maxLength": 8', '"maxLength": 80'))
    for separators in ((", ", ": "), (",", ":")):
        matcher = compiler.submit(of_schema(schema)).result()
        assert max(allowed_ids(matcher)) < tokenizer.vocab_size
        for token_id in tokenizer.encode(json.dumps(value, ensure_ascii=False, separators=separators)):
            assert not matcher.is_complete
            assert token_id in allowed_ids(matcher)
            matcher.accept(token_id)
        assert matcher.is_complete
    for blank in ("{\n", "{  "):
        matcher = compiler.submit(of_schema(schema)).result()
        with pytest.raises(RequestError):
            deque(map(matcher.accept, tokenizer.encode(blank + '"vendor"')))


def test_a_model_without_an_end_ends_with_its_form(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, ())
    matcher = compiler.submit(structured("regex", "ab?")).result()
    matcher.accept(tokenizer.encode("a")[0])
    assert not matcher.is_complete
    allowed = allowed_ids(matcher)
    assert allowed - {tokenizer.vocab_size} == {tokenizer.encode("b")[0]}
    matcher.accept(tokenizer.encode("b")[0])
    assert matcher.is_complete


# What is wrong before anything is compiled


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", ""),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "true"),
        ("json_schema", '{"a":' * 100_000),
        ("json_schema", '{"title": "' + "x" * 2**17 + '"}'),
        ("json_object", "{}"),
        ("regex", ""),
        ("regex", "a" * (2**17 + 1)),
        ("choice", "yes"),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
        ("choice", '["a", 1]'),
        ("choice", '{"a": 1}'),
        ("choice", json.dumps([str(i) for i in range(1025)])),
        ("grammar", ""),
        ("poem", "roses"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_form_at_all_is_refused_at_once(kind: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(kind=kind, text=text, param="guided_json")
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "guided_json")
    assert len(caught.value.message) < 300
