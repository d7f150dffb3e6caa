"""Grammars of answers: compiled by llguidance off the engine's path, followed token by token.

What a schema or grammar may cost is bounded before and by llguidance's own counters, so that a hostile one is refused
rather than slow: the largest that pass compile in about 0.2 s and take some 30 ms for a step's mask (one CPU core,
49,152 tokens); usual ones 2 ms and 0.05 ms.
"""

import json
import math
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import llguidance
import numpy as np
import numpy.typing as npt

from mmserve.errors import RequestError
from mmserve.request import Sequence as EngineSequence
from mmserve.request import StructuredOutput
from mmserve.weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Masks = npt.NDArray[np.uint8]

MAX_COMPILED = 64
# 10,007 compiles in 0.06 s, 1,234,567 in 33 s and 600 MB: there is a state for every remainder.
MAX_MULTIPLE = 10_000
_PATTERNS = frozenset({"pattern", "format", "patternProperties"})
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_items_in_row=1_000,
    max_grammar_size=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
# One space at most, so that no model fills its answer with them.
_JSON_STYLE: "JsonCompileOptions" = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
}


class Matcher:
    """Follows one answer through its grammar."""

    def __init__(self, backend: llguidance.LLMatcher, param: str, num_tokens: int) -> None:
        self.backend = backend
        self.num_tokens = num_tokens
        self._param = param

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow any more."""
        return self.backend.is_stopped()

    def accept(self, token_id: int) -> None:
        """Take the next token. Raises `RequestError` (`invalid_schema`) if no answer can come of it."""
        if not self.backend.consume_token(token_id):
            raise _refusal(self._param, "cannot be followed any further", self.backend.get_error())


def token_masks(sequences: Sequence[EngineSequence]) -> Masks:
    """`[n, bytes]`: of each sequence a bit for every token that may come next, lowest bit first."""
    matchers = [sequence.matcher for sequence in sequences if isinstance(sequence.matcher, Matcher)]
    assert len(matchers) == len(sequences)
    words = np.zeros((len(matchers), -(-matchers[0].num_tokens // 32)), dtype=np.uint32)
    if len(matchers) == 1:
        matchers[0].backend.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    else:
        each = [(matcher.backend, row) for row, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(each, words.ctypes.data, words.strides[0], len(words))
    return words.view(np.uint8)


def forbid_tokens(mask: npt.NDArray[np.uint8], token_ids: Sequence[int]) -> None:
    """Take these out of one row of a mask, unless nothing else is in it."""
    if not token_ids:
        return
    rest = mask.copy()
    for token_id in token_ids:
        rest[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
    if rest.any():
        mask[:] = rest


@cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


class GrammarCompiler:
    """Compiles in a thread of its own, one after the other, and keeps what was asked for last.

    Masks have a bit for each of the `vocab_size` tokens of the model and for those that only the tokenizer has.
    """

    def __init__(
        self,
        open_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        capacity: int = MAX_COMPILED,
    ) -> None:
        self._open_tokenizer = open_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._capacity = capacity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # Only the thread looks at these.
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, llguidance.LLMatcher] = OrderedDict()
        self.num_compiled = 0

    def submit(self, structured: StructuredOutput) -> Future[Matcher]:
        """A matcher at the start of an answer, or `RequestError` (`invalid_schema`)."""
        return self._thread.submit(self._matcher, structured)

    def _matcher(self, structured: StructuredOutput) -> Matcher:
        if self._tokenizer is None:
            self._tokenizer = _as_llguidance(self._open_tokenizer(), self._vocab_size, self._eos_token_ids)
        if structured not in self._compiled:
            self._compiled[structured] = self._compile(structured, self._tokenizer)
        self._compiled.move_to_end(structured)
        if len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)
        copy = self._compiled[structured].deep_copy()
        return Matcher(copy, structured.param, self._tokenizer.vocab_size)

    def _compile(self, structured: StructuredOutput, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
        self.num_compiled += 1
        _check_cost(structured)
        try:
            grammar = _grammar(structured)
        except ValueError as error:
            raise _refusal(structured.param, "cannot be read", str(error)) from None
        _check_compilation(structured, grammar)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(structured.param, "cannot be followed", matcher.get_error())
        # A grammar that allows nothing, or is too complex from the start, shows at its first mask.
        matcher.compute_bitmask()
        if matcher.is_stopped():
            reason = matcher.get_error()
            is_empty = not reason or reason.startswith("NoExtension")
            raise _refusal(structured.param, "allows no answer", "nothing can follow it" if is_empty else reason)
        return matcher


def _grammar(structured: StructuredOutput) -> str:
    if structured.kind in ("json_schema", "json_object"):
        style: JsonCompileOptions = {
            **_JSON_STYLE,
            "lenient": structured.lenient,
            "coerce_one_of": structured.lenient,
        }
        schema = structured.text or '{"type": "object"}'
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=style)
    if structured.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(structured.text)
    return llguidance.grammar_from("choice" if structured.kind == "choice" else "grammar", structured.text)


def _check_cost(structured: StructuredOutput) -> None:
    """Refuse what llguidance would compile however long it takes, in whatever memory."""
    if structured.kind == "grammar" and "%json" in structured.text:
        raise _refusal(structured.param, "must not hold a JSON Schema", "give the schema itself")
    if structured.kind == "json_schema" and _common_multiple(json.loads(structured.text)) > MAX_MULTIPLE:
        raise _refusal(structured.param, "has values of multipleOf that are too large", f"together over {MAX_MULTIPLE}")


def _check_compilation(structured: StructuredOutput, grammar: str) -> None:
    """Try elsewhere what has patterns that may all have to fit: whether any text does can take for ever to find out."""
    if structured.kind == "json_schema":
        is_suspicious = sum(1 for keyword, _ in _keywords(json.loads(structured.text)) if keyword in _PATTERNS) > 1
    else:
        is_suspicious = structured.kind == "grammar" and any(sign in structured.text for sign in "&~")
    if not is_suspicious:
        return
    command = [sys.executable, "-m", "mmserve.engine.grammar_probe"]
    if subprocess.run(command, input=grammar.encode(), capture_output=True, check=False).returncode != 0:
        raise _refusal(structured.param, "takes too long to compile", "use fewer patterns that one value has to fit")


def _common_multiple(schema: object) -> int:
    """Of all values of `multipleOf`, in units of their last decimal: all may hold for one number."""
    steps = [Decimal(str(abs(value))).normalize() for value in _numbers_under("multipleOf", schema)]
    num_decimals = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    return math.lcm(*(int(Fraction(step) * 10 ** max(num_decimals, 0)) for step in steps))


def _numbers_under(keyword: str, schema: object) -> Iterator[float]:
    for name, value in _keywords(schema):
        if name != keyword or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if 0 < abs(value) < math.inf:
            yield value


def _keywords(schema: object) -> Iterator[tuple[str, object]]:
    """All of it, names of properties among them. Without recursion: the schema may be as deep as it likes."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from part.items()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _refusal(param: str, problem: str, reason: str) -> RequestError:
    words = " ".join(reason.removesuffix("<non-verbose/>").split())
    return RequestError("invalid_schema", f"{param} {problem}: {words[:300]}", param=param)


class _Vocabulary:
    """A tokenizer as `TokenizerWrapper` takes one, with a token for each of the model's logits at least."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        num_tokens = max(tokenizer.vocab_size, vocab_size)
        # A model without an end gets one beyond its logits.
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < num_tokens] or [num_tokens]
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(max(num_tokens, self.eos_token_ids[0] + 1))]
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *self.eos_token_ids})
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, parse_special=False)


def _as_llguidance(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
