"""The offline facade: prompts of every kind in, answers in order out, and nothing left running."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import engine_config, greedy
from reference_models import save_reference_model

from mmserve.errors import EngineError, RequestError, SetupError
from mmserve.llm import LLM, Prompt
from mmserve.request import SamplingParams

PROMPT = [11, 52, 93, 134, 175, 216]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("qwen2", tmp_path_factory.mktemp("qwen2"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(config=engine_config(folder, prefix_caching=False)) as llm:
        yield llm


def test_one_prompt_of_text_or_of_ids(llm: LLM) -> None:
    ids = llm._client.tokenizer.encode("The invoice", add_special_tokens=True)
    (of_text,), (of_ids,) = llm.generate("The invoice", greedy(6)), llm.generate(ids, greedy(6))
    assert of_text == of_ids
    assert of_text[0].num_prompt_tokens == len(ids)
    assert len(of_text[0].token_ids) == 6


def test_many_prompts_in_order(llm: LLM) -> None:
    prompts: list[Prompt] = ["The invoice", [5, 6, 7], "Page after page"]
    answers = llm.generate(prompts, greedy(6))
    assert answers == [llm.generate(prompt, greedy(6))[0] for prompt in prompts]
    assert len({answer[0].token_ids for answer in answers}) == 3


def test_parameters_for_each_prompt(llm: LLM) -> None:
    answers = llm.generate([PROMPT, PROMPT], [greedy(2), greedy(5, n=2)])
    assert [[len(completion.token_ids) for completion in answer] for answer in answers] == [[2], [5, 5]]


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    ids = llm._client.tokenizer.encode_chat(conversation)
    assert llm.chat(conversation, greedy(4)) == llm.generate([ids], greedy(4))
    one, two = llm.chat([conversation, [{"role": "user", "content": "Bye"}]], greedy(4))
    assert one == llm.chat(conversation, greedy(4))[0]
    assert two[0].token_ids != one[0].token_ids


def test_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def inside() -> int:
        return len(llm.generate(PROMPT, greedy(3))[0][0].token_ids)

    assert asyncio.run(inside()) == 3


def test_works_from_many_threads(llm: LLM) -> None:
    prompts = [[i, *PROMPT] for i in range(3, 7)]
    alone = [llm.generate(prompt, greedy(8)) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: llm.generate(prompt, greedy(8)), prompts)) == alone


@pytest.mark.parametrize("prompts", [[["not", "ids"]], [[1], []], [[1], [10**6]], [[1] * 600]], ids=str)
def test_a_bad_prompt_is_an_error_and_the_engine_lives(llm: LLM, prompts: list[list[int]]) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, greedy(2))
    assert len(llm.generate(PROMPT, greedy(2))[0][0].token_ids) == 2


def test_too_few_parameters_are_an_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling parameters") as caught:
        llm.generate([PROMPT, PROMPT], [greedy(2)])
    assert caught.value.param == "params"


def test_what_was_asked_beside_a_bad_prompt_is_given_up(llm: LLM) -> None:
    """Nobody will read those answers: the engine must not go on for them."""
    with pytest.raises(RequestError):
        llm.generate([PROMPT, [10**6]], greedy(500))
    deadline = time.monotonic() + 10
    while llm._client._mailboxes:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(llm.generate(PROMPT, greedy(2))[0][0].token_ids) == 2
    assert llm._client.stats.num_requests_running == 0


def test_without_parameters_an_answer_ends_with_the_context_at_the_latest(folder: Path) -> None:
    with LLM(config=replace(engine_config(folder), max_model_len=32)) as llm:
        ((completion,),) = llm.generate(PROMPT)
        assert completion.finish_reason in ("stop", "length")
        assert len(completion.token_ids) <= 32 - len(PROMPT)


def test_closing_ends_calls_in_flight(folder: Path) -> None:
    llm = LLM(config=engine_config(folder))
    errors: list[str] = []

    def ask() -> None:
        try:
            llm.generate([PROMPT] * 8, greedy(500))
        except EngineError as error:
            errors.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    while not llm._client._mailboxes:
        time.sleep(0.0005)
    llm.close()
    thread.join(10)
    assert errors == ["shutting_down"]


def test_after_closing_it_says_so_and_closing_again_is_harmless(folder: Path) -> None:
    with LLM(config=engine_config(folder)) as llm:
        llm.close()
        with pytest.raises(EngineError) as caught:
            llm.generate(PROMPT, SamplingParams())
        assert caught.value.code == "shutting_down"
    assert not llm._thread.is_alive()


def test_an_engine_that_cannot_start_leaves_nothing_running(folder: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(SetupError):
        LLM(config=replace(engine_config(folder, num_blocks=2), max_model_len=500))
    assert {thread for thread in threading.enumerate() if thread.name in ("llm", "engine")} <= before


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SetupError) as caught:
        LLM("/nowhere/at/all")
    assert caught.value.code == "model_unavailable"
