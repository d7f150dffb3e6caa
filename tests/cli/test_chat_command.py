"""`mmserve chat` with an engine that repeats what it was told."""

import asyncio
import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_fakes import Invoke

from mmserve.commands import chat
from mmserve.commands.options import EngineOptions
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.errors import RequestError
from mmserve.request import ImageSpan, SamplingParams, StructuredOutput

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")


@dataclass
class Delta:
    text: str
    finish_reason: str | None = None


class CharacterTokenizer:
    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(char) for message in messages for char in f"{message['role'][0]}:{message['content']};"]


class EchoEngine:
    """Answers with the prompt in brackets, word by word; a prompt with `sleep` in it takes for ever."""

    image_processor = None

    def __init__(self, max_model_len: int = 200) -> None:
        self.tokenizer = CharacterTokenizer()
        self.max_model_len = max_model_len
        self.params: SamplingParams | None = None
        self.is_ready = False
        self.num_aborted = 0

    def wait_until_ready(self, timeout: float | None = None) -> None:
        self.is_ready = True

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> AsyncIterator[Delta]:
        self.params = params
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError("context_length_exceeded", "The prompt is too long.")
        prompt = "".join(chr(token_id) for token_id in prompt_token_ids)
        yield Delta("[")
        if prompt.endswith("sleep;"):
            try:
                await asyncio.sleep(60)
            finally:
                self.num_aborted += 1
        yield Delta(prompt)
        yield Delta("]", "length" if params.max_tokens else "stop")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EchoEngine:
    echo = EchoEngine()

    @contextlib.contextmanager
    def started(options: EngineOptions) -> Iterator[EchoEngine]:
        yield echo

    monkeypatch.setattr(chat, "started_engine", started)
    return echo


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines that a person types; the conversation begins as in a terminal."""
    lines: list[str] = []

    def read_line(_prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr(chat, "_question", lambda _: None)
    monkeypatch.setattr("builtins.input", read_line)
    yield lines
    assert lines == []


def test_a_prompt_is_answered_once(invoke: Invoke, engine: EchoEngine) -> None:
    result = invoke("chat", "Hi", "--system", "Be brief", "--temperature", "0", "--stop", "x", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "[s:Be brief;u:Hi;]\n", "")
    assert engine.params is not None
    assert engine.is_ready
    assert (engine.params.temperature, engine.params.top_p, engine.params.stop) == (0.0, 0.95, ("x",))


def test_a_schema_reaches_the_engine(invoke: Invoke, engine: EchoEngine) -> None:
    Path("bill.json").write_text('{"type": "object"}')
    assert invoke("chat", "Hi", "--json-schema", "bill.json", "-q").exit_code == 0
    assert engine.params is not None
    assert engine.params.structured == StructuredOutput(kind="json_schema", text='{"type": "object"}', lenient=True)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_a_file_that_is_no_schema_is_a_usage_error(invoke: Invoke, engine: EchoEngine, content: bytes | None) -> None:
    if content is not None:
        Path("bill.json").write_bytes(content)
    result = invoke("chat", "Hi", "--json-schema", "bill.json", "-q")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json-schema" in result.stderr


def test_the_demonstration_model_is_named_as_such(invoke: Invoke, engine: EchoEngine) -> None:
    assert "demonstration" in invoke("chat", "Hi").stderr
    assert invoke("chat", "Hi", "--model", "some/model").stderr == ""


def test_a_picture_for_a_text_model_is_refused_with_a_way_out(invoke: Invoke, engine: EchoEngine) -> None:
    Path("a.png").write_bytes(b"")
    result = invoke("chat", "Hi", "--image", "a.png", "-q")
    assert result.exit_code == 1
    assert "mmserve summarize" in result.stderr


def test_what_is_piped_is_the_question(invoke: Invoke, engine: EchoEngine) -> None:
    assert invoke("chat", "-q", input="What is it?\n").stdout == "[u:What is it?;]\n"


def test_nothing_to_answer_is_a_usage_error(invoke: Invoke, engine: EchoEngine) -> None:
    result = invoke("chat", input=" \n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing to answer" in result.stderr


def test_what_is_piped_follows_the_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("one\ntwo\n")
    with notes.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert chat._question("Sum up:") == "Sum up:\n\none\ntwo"


def test_a_device_that_never_ends_is_not_read_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert chat._question("Hi") == "Hi"


def test_an_answer_cut_off_says_so(invoke: Invoke, engine: EchoEngine) -> None:
    assert "cut off" in invoke("chat", "Hi", "--max-tokens", "3", "-q").stderr


def test_wrong_sampling_is_a_usage_error(invoke: Invoke, engine: EchoEngine) -> None:
    result = invoke("chat", "Hi", "--top-p", "7")
    assert result.exit_code == 2
    assert "top_p" in result.stderr


def test_a_question_too_long_fails(invoke: Invoke, engine: EchoEngine) -> None:
    result = invoke("chat", "Hi" * 200, "-q")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "mmserve: The prompt is too long.\n"


def test_a_conversation_remembers_until_it_is_cleared(invoke: Invoke, engine: EchoEngine, typed: list[str]) -> None:
    typed += ["a", "", "b", "/clear", "c", "/exit"]
    result = invoke("chat", "-q", "--system", "S")
    assert result.exit_code == 0
    assert result.stdout == "[s:S;u:a;]\n[s:S;u:a;a:[s:S;u:a;];u:b;]\n[s:S;u:c;]\n"


def test_a_conversation_ends_with_the_input(invoke: Invoke, engine: EchoEngine, typed: list[str]) -> None:
    typed += ["a"]
    result = invoke("chat", "-q")
    assert (result.exit_code, result.stdout) == (0, "[u:a;]\n")


def test_a_conversation_forgets_its_beginning_when_the_context_is_full(
    invoke: Invoke, engine: EchoEngine, typed: list[str]
) -> None:
    engine.max_model_len = 80
    typed += ["a" * 30, "b" * 30]
    result = invoke("chat", "-q", "--system", "S")
    assert result.stdout.splitlines()[1] == f"[s:S;u:{'b' * 30};]"


def test_a_question_too_long_is_not_remembered(invoke: Invoke, engine: EchoEngine, typed: list[str]) -> None:
    typed += ["x" * 300, "b"]
    result = invoke("chat", "-q")
    assert result.exit_code == 0
    assert result.stdout == "[u:b;]\n"
    assert "too long" in result.stderr


TERMINAL_CHAT = f"""
import contextlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_chat_command as fakes
from mmserve import cli
from mmserve.commands import chat

@contextlib.contextmanager
def started(options):
    yield fakes.EchoEngine()

chat.started_engine = started
cli.app(["chat", "-q"], prog_name="mmserve")
"""


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self) -> None:
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL_CHAT],
            stdin=there,
            stdout=there,
            stderr=there,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(there)
        self._seen = ""

    def wait_for(self, text: str) -> None:
        assert self._saw(text, 30.0), self._seen

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, again if it came in the moment between a prompt and the wait for input, where Python loses it."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            if self._saw(text, 0.5):
                return
        raise AssertionError(self._seen)

    def _saw(self, text: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while text not in self._seen:
            if not select.select([self._here], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self._seen += os.read(self._here, 4096).decode()
        self._seen = self._seen.partition(text)[2]
        return True

    def type(self, text: str) -> None:
        os.write(self._here, text.encode())

    def close(self) -> int:
        code = self.process.wait(timeout=20)
        os.close(self._here)
        return code


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.process.kill()
    terminal.process.wait()


def test_ctrl_c_interrupts_the_answer_alone(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("sleep\n")
    terminal.wait_for("sleep\r\n[")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[interrupted]")
    terminal.wait_for("> ")
    terminal.type("on\n")
    terminal.wait_for("[u:sleep;a:[;u:on;]")
    terminal.wait_for("> ")
    terminal.interrupt_until("Ctrl-D ends")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_an_interrupted_answer_is_aborted_at_once_and_remembered_as_far_as_it_went() -> None:
    engine = EchoEngine()
    conversation = chat.Conversation(engine, PromptBuilder(engine.tokenizer), SamplingParams())  # type: ignore[arg-type]

    async def interrupt() -> None:
        task = asyncio.create_task(conversation.answer("sleep"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_aborted == 1

    asyncio.run(interrupt())
    assert conversation.messages == [{"role": "user", "content": "sleep"}, {"role": "assistant", "content": "["}]


def test_text_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    chat._write("a\x1b[2Jb\u00a0c\n")
    assert screen.getvalue() == "a\ufffd[2Jb\u00a0c\n"
