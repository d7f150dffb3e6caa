"""The whole command line: help, version, settings, errors, speed of starting."""

import subprocess
import sys
from pathlib import Path

import cli_fakes
import pytest
from cli_fakes import Invoke

from mmserve import __version__, cli
from mmserve.errors import DocumentError, EngineError, RequestError, SetupError

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

HEAVY = ("torch", "transformers", "fastapi", "numpy", "PIL", "rapidocr", "huggingface_hub")


def test_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"mmserve {__version__}\n")


def test_help_names_every_command_and_says_how_it_ends(invoke: Invoke) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for name in cli.COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert "130  interrupted" in result.stdout


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(invoke: Invoke) -> None:
    result = invoke("shot")
    assert result.exit_code == 2
    assert "Did you mean 'shout'" in result.stderr


def test_help_of_a_command_is_complete_and_in_groups(invoke: Invoke) -> None:
    result = invoke("shout", "--help")
    assert result.exit_code == 0
    for heading in ("Which documents:", "Results:", "Running:", "Model and engine:", "Reading pages:"):
        assert heading in result.stdout
    for option in ("--max-num-batched-tokens", "--no-enable-prefix-caching", "-o, --output-dir", "--gpu-memory-ut"):
        assert option in result.stdout
    assert "MMSERVE_" not in result.stdout
    assert "--install-completion" not in result.stdout


def test_starting_imports_nothing_heavy() -> None:
    code = f"""
import sys
from mmserve import cli
for name in cli.COMMANDS:
    cli._CommandTable()[name]
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_come_from_flag_then_variable_then_file(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("one")
    Path("mmserve.toml").write_text('model = "from/file"\nmax-num-seqs = 7\nenable-prefix-caching = false\n')
    invoke("shout", "a.txt")
    monkeypatch.setenv("MMSERVE_MODEL", "from/variable")
    invoke("shout", "a.txt")
    monkeypatch.setenv("MMSERVE_ENABLE_PREFIX_CACHING", "1")
    invoke("shout", "a.txt", "--model", "from/flag", "--max-num-seqs", "9")
    assert cli_fakes.events[::2] == [
        "start from/file 7 False",
        "start from/variable 7 False",
        "start from/flag 9 True",
    ]


def test_a_table_is_for_its_command_alone(invoke: Invoke) -> None:
    Path("a.txt").write_text("one")
    Path("mmserve.toml").write_text('model = "all"\n[shout]\nmodel = "shout"\nformat = "jsonl"\n[chat]\nsystem = "Hi."')
    assert invoke("shout", "a.txt").stdout.startswith("{")
    assert cli_fakes.events[0] == "start shout None True"


def test_the_settings_file_may_be_named_or_in_the_home_folder(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("one")
    configuration = Path.home() / ".config" / "mmserve"
    configuration.mkdir(parents=True)
    (configuration / "mmserve.toml").write_text('model = "from/home"')
    Path("other.toml").write_text('model = "from/other"')
    invoke("shout", "a.txt")
    invoke("--config", "other.toml", "shout", "a.txt")
    monkeypatch.setenv("MMSERVE_CONFIG", "other.toml")
    invoke("shout", "a.txt")
    assert [event.split()[1] for event in cli_fakes.events[::2]] == ["from/home", "from/other", "from/other"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("modell = 'x'\n[shout]\ngreet = 1", "mmserve.toml: no option is called modell, shout.greet"),
        ("[shuot]\nmodel = 'x'", "no option is called shuot"),
        ("[shout]\nport = 1", "no option is called shout.port"),
        ("model = ", "mmserve.toml is not valid TOML"),
        ("max-num-seqs = 'many'", "--max-num-seqs"),
    ],
)
def test_wrong_settings_are_usage_errors(invoke: Invoke, settings: str, sentence: str) -> None:
    Path("a.txt").write_text("one")
    Path("mmserve.toml").write_text(settings)
    result = invoke("shout", "a.txt")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert cli_fakes.events == []


def test_an_option_of_another_command_may_stand_at_the_top(invoke: Invoke) -> None:
    Path("a.txt").write_text("one")
    Path("mmserve.toml").write_text("temperature = 0.5\n")
    assert invoke("shout", "a.txt").exit_code == 0


def test_a_settings_file_that_is_named_must_exist(invoke: Invoke) -> None:
    result = invoke("--config", "none.toml", "shout", "-")
    assert (result.exit_code, result.stderr) == (2, "mmserve: none.toml cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (RequestError("invalid_request", "Wrong."), 2, "mmserve: Wrong."),
        (RequestError("unauthorized", "No such key."), 2, "mmserve: No such key."),
        (RequestError("not_found", "Not here."), 1, "mmserve: Not here."),
        (DocumentError("corrupt_document", "Cut off."), 1, "mmserve: Cut off."),
        (EngineError("engine_dead", "It died."), 1, "mmserve: It died."),
        (SetupError("insufficient_memory", "Too large."), 3, "mmserve: Too large."),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 3, "the Python package torch is missing"),
        (PermissionError(13, "Permission denied", "/x"), 1, "mmserve: Permission denied: /x"),
        (KeyError("x"), 1, "mmserve: unexpected KeyError: 'x'"),
    ],
)
def test_errors_are_sentences(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, sentence: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli_fakes, "run_task", fail)
    result = invoke("shout", "-")
    assert result.exit_code == code
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_verbose_shows_tracebacks(invoke: Invoke) -> None:
    Path("a.txt").write_text("bad")
    result = invoke("shout", "a.txt", "-v", "-q")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
