"""`mmserve eval perplexity`, and `mmserve quantize` from the command line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import our_runner
from reference_models import load_reference_model, save_reference_model
from typer.testing import CliRunner

from mmserve.commands.eval import app as eval_app
from mmserve.commands.quantize import app as quantize_app
from mmserve.errors import DocumentError, RequestError, SetupError
from mmserve.quantizer.perplexity import measure, windows
from mmserve.weights.checkpoint import open_checkpoint

TEXT = "The invoice of 12 March is due within 30 days; the total is 1,284.50 EUR. Façade, 東京. " * 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(app: Any, *arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 10, 11, 57])
@pytest.mark.parametrize(("size", "stride"), [(10, 5), (10, 9), (10, 1), (64, 32)])
def test_every_token_but_the_first_is_predicted_once(num_tokens: int, size: int, stride: int) -> None:
    found = list(windows(num_tokens, size, stride))
    assert [i for window in found for i in range(window.first, window.end)] == list(range(1, num_tokens))
    assert all(window.end - window.start <= size for window in found)
    assert all(window.first - window.start >= size - stride for window in found[1:])


def test_perplexity_is_that_of_transformers(llama: Path) -> None:
    tokenizer = open_checkpoint(str(llama)).tokenizer()
    text = TEXT[:600]
    ids = tokenizer.encode(text)
    with torch.no_grad():
        output = load_reference_model(llama)(torch.tensor([ids]), labels=torch.tensor([ids]))
    result = measure([text], tokenizer, our_runner(llama), size=512, stride=256)
    assert result.num_tokens == len(ids) - 1
    assert result.loss == pytest.approx(float(output.loss), rel=1e-5)
    num_bytes = sum(len(tokenizer.token_bytes(i)) for i in ids[1:])
    assert result.num_bytes == num_bytes
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss * result.num_tokens / num_bytes / math.log(2))


def test_overlapping_windows_see_what_lies_before(llama: Path) -> None:
    tokenizer, runner = open_checkpoint(str(llama)).tokenizer(), our_runner(llama)
    ids = tokenizer.encode(TEXT)[:40]
    whole = runner.prompt_logprobs(ids, 1)
    assert torch.allclose(runner.prompt_logprobs(ids, 30), whole[29:], atol=1e-5)
    assert not torch.allclose(runner.prompt_logprobs(ids[20:], 10), whole[29:], atol=1e-3)


def test_the_commands_together(llama: Path, text_file: Path, tmp_path: Path) -> None:
    about = run(
        quantize_app, llama, "-o", tmp_path / "out", "--scheme", "gptq", "--calibration", text_file,
        "--samples", 4, "--seq-len", 32, "--group-size", 32, "--dtype", "float32", "--device", "cpu", "-q",
    )  # fmt: skip
    assert (about["scheme"], about["num_samples"], about["num_layers"]) == ("gptq", 4, 3)
    assert about["num_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    options = ("--dtype", "float32", "--device", "cpu", "--window", 128, "-q")
    full = run(eval_app, "perplexity", llama, text_file, *options)
    small = run(eval_app, "perplexity", tmp_path / "out", text_file, *options)
    assert full["num_tokens"] == small["num_tokens"]
    assert (full["window"], full["stride"]) == (128, 64)
    assert small["perplexity"] != full["perplexity"]
    assert abs(small["loss"] - full["loss"]) < 1.0
    checkpoint = open_checkpoint(str(llama))
    stored = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
    assert full["model_bytes"] == pytest.approx(stored, rel=0.02)


def test_fp8_takes_texts_or_none(llama: Path, text_file: Path, tmp_path: Path) -> None:
    options = ("--scheme", "fp8", "--seq-len", 32, "--samples", 3, "--device", "cpu", "-q")
    assert run(quantize_app, llama, "-o", tmp_path / "a", *options)["num_samples"] == 0
    assert run(quantize_app, llama, "-o", tmp_path / "b", *options, "--calibration", text_file)["num_samples"] == 3


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (["--scheme", "awq"], RequestError, "needs texts"),
        (["--scheme", "rtn", "--calibration", "{text}"], RequestError, "weights alone"),
        (["--scheme", "gptq", "--calibration", "{text}", "--seq-len", "5000"], DocumentError, "one sample takes 5000"),
        (["--scheme", "gptq", "--calibration", "{nothing}"], RequestError, "does not exist"),
        (["--scheme", "gptq", "--calibration", "{empty}"], RequestError, "no text"),
        (["--scheme", "gptq", "--calibration", "{empty}", "-o", "{text}"], RequestError, "is not a folder"),
        (["--scheme", "gptq", "--calibration", "{empty}", "-o", "{full}"], RequestError, "is not empty"),
        (["--scheme", "gptq", "--calibration", ""], SystemExit, "2"),
        (["--scheme", "rtn", "--group-size", "48"], RequestError, "--group-size must be one of"),
        (["--scheme", "gptq", "--calibration", "{text}", "--damping", "0"], RequestError, "--damping"),
    ],
)
def test_bad_input_to_quantize(
    arguments: list[str], error: type[Exception], sentence: str, llama: Path, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"text": text_file, "nothing": tmp_path / "nothing", "empty": tmp_path / "empty", "full": tmp_path}
    filled = [argument.format(**places) for argument in arguments]
    result = CliRunner().invoke(quantize_app, [str(llama), "-o", str(tmp_path / "out"), *filled])
    assert isinstance(result.exception, error)
    assert sentence in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_bad_input_to_eval(llama: Path, text_file: Path, tmp_path: Path) -> None:
    def fails(*arguments: object) -> BaseException | None:
        return CliRunner().invoke(eval_app, ["perplexity", *map(str, arguments)]).exception

    (tmp_path / "x.txt").write_text("a")
    assert "exceeds the model's context" in str(fails(llama, text_file, "--window", 4096))
    assert "--stride" in str(fails(llama, text_file, "--window", 64, "--stride", 64))
    assert "too little text" in str(fails(llama, tmp_path / "x.txt"))
    assert isinstance(fails("no-such-model", text_file), SetupError)
    assert isinstance(fails(llama, tmp_path / "nothing.txt"), RequestError)
