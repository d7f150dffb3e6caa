"""What `mmserve quantize` writes: transformers and the engine load it, and compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from quantized_models import calibration_ids, our_logprobs, our_runner, quantizer, their_logprobs
from reference_gguf import save_reference_gguf
from reference_llava import FAMILIES as LLAVA
from reference_llava import save_llava
from reference_models import save_reference_model
from reference_qwen_vl import save_qwen_vl
from safetensors import safe_open

from mmserve.errors import RequestError
from mmserve.weights.checkpoint import open_checkpoint

IDS = calibration_ids(1, seed=9)[0].tolist()
_KIND = {"fp8": "float", "int8": "int"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


@pytest.mark.parametrize(
    ("scheme", "symmetric"), [*((scheme, flag) for scheme in ("awq", "gptq", "rtn") for flag in (False, True))]
)
def test_transformers_and_the_engine_agree(llama: Path, tmp_path: Path, scheme: str, symmetric: bool) -> None:
    out = tmp_path / "out"
    result = quantizer(llama, out, scheme, symmetric=symmetric).run()
    assert (result.num_layers, result.num_layers_resumed) == (3, 0)
    ours, theirs = our_logprobs(out, IDS), their_logprobs(out, IDS)
    full = our_logprobs(llama, IDS)
    assert float((ours - theirs).abs().max()) < 2e-3
    assert 1e-4 < float((ours - full).abs().mean()) < 1.0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert QuantizationConfig.model_validate(config).format == config["format"]


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_transformers_and_the_engine_agree_on_eight_bits(llama: Path, tmp_path: Path, scheme: str) -> None:
    quantizer(llama, tmp_path, scheme).run()
    full, ours, theirs = our_logprobs(llama, IDS), our_logprobs(tmp_path, IDS), their_logprobs(tmp_path, IDS)
    assert 1e-4 < float((ours - full).abs().mean()) < 0.3
    # Numbers of activations fall to one side or the other by the last bit of a scale.
    assert float((ours - theirs).abs().mean()) < 0.1
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert QuantizationConfig.model_validate(config["quantization_config"]).format == f"{_KIND[scheme]}-quantized"
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    path.write_text(json.dumps(config))
    assert float((our_logprobs(tmp_path, IDS) - their_logprobs(tmp_path, IDS)).abs().max()) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["awq", "gptq", "rtn", "fp8", "int8"])
def test_a_gpu_makes_what_a_cpu_makes(llama: Path, tmp_path: Path, scheme: str) -> None:
    """But for numbers that fall to one side or the other: as far from full precision, and as near to each other."""
    for device in ("cpu", "cuda"):
        quantizer(llama, tmp_path / device, scheme, device=device, samples=calibration_ids()).run()
    full, on_cpu, on_gpu = (our_logprobs(folder, IDS) for folder in (llama, tmp_path / "cpu", tmp_path / "cuda"))
    lost = float((on_cpu - full).norm())
    assert 0.7 * lost < float((on_gpu - full).norm()) < 1.4 * lost
    assert float((on_gpu - on_cpu).norm()) < lost


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm2", "mistral"])
@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_families(family: str, scheme: str, tmp_path: Path) -> None:
    folder = save_reference_model(family, tmp_path / "full", intermediate_size=128)
    quantizer(folder, tmp_path / "out", scheme).run()
    ours, theirs = our_logprobs(tmp_path / "out", IDS), their_logprobs(tmp_path / "out", IDS)
    assert float((ours - theirs).abs().max()) < 2e-3


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_what_sees_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    full, out = tmp_path / "full", tmp_path / "out"
    if name == "llava":
        save_llava(LLAVA["llava"], full)
    else:
        save_qwen_vl(name, full)
    quantizer(full, out, "awq").run()
    before, after = open_checkpoint(str(full)), open_checkpoint(str(out))
    kept = [name for name in before.names() if not name.startswith("model.layers.")]
    assert any(name.startswith("vision.") for name in kept)
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in kept)
    assert not any("weight_packed" in name for name in after.names() if not name.startswith("model.layers."))
    assert after.processor_config == before.processor_config
    ours = our_logprobs(out, IDS)
    theirs = their_logprobs(out, IDS, "AutoModelForImageTextToText")
    assert float((ours - theirs).abs().max()) < 2e-3


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = save_reference_gguf(llama, tmp_path / "model.gguf", type_name="Q8_0")
    out = tmp_path / "out"
    quantizer(file, out, "gptq").run()
    text = "The invoice is due.<|im_end|> naïve 東京"
    ids = open_checkpoint(str(file)).tokenizer().encode(text)
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert open_checkpoint(str(out)).tokenizer().encode(text) == ids
    assert tokenizer.chat_template == open_checkpoint(str(file)).tokenizer().chat_template
    assert float((our_logprobs(out, IDS) - their_logprobs(out, IDS)).abs().max()) < 2e-3


def test_calibrated_schemes_beat_plain_rounding(tmp_path: Path) -> None:
    """Of a model whose inputs differ in size, by the distance of all hidden layers' logits."""
    folder = save_reference_model("llama", tmp_path / "full", intermediate_size=128)
    ids = calibration_ids(16)
    full = torch.stack([our_logprobs(folder, row) for row in ids.tolist()])
    errors = {}
    for scheme in ("rtn", "awq", "gptq"):
        quantizer(folder, tmp_path / scheme, scheme, samples=ids).run()
        runner = our_runner(tmp_path / scheme)
        errors[scheme] = float(
            torch.stack([runner.prompt_logprobs(row, 1) - want for row, want in zip(ids.tolist(), full, strict=True)])
            .square()
            .mean()
        )
    assert errors["awq"] < errors["rtn"]
    assert errors["gptq"] < errors["rtn"]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(("scheme", "has_texts"), [("awq", True), ("gptq", True), ("fp8", True), ("fp8", False)])
def test_an_interrupted_run_goes_on_where_it_was(llama: Path, tmp_path: Path, scheme: str, has_texts: bool) -> None:
    given: dict[str, Any] = {"samples": calibration_ids() if has_texts else None, "keep": 0.3}

    def stop(done: int, _all: int) -> None:
        if done == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        quantizer(llama, tmp_path / "twice", scheme, **given).run(stop)
    assert not (tmp_path / "twice" / "config.json").exists()
    assert quantizer(llama, tmp_path / "twice", scheme, **given).run().num_layers_resumed == 2
    quantizer(llama, tmp_path / "once", scheme, **given).run()
    with (
        safe_open(str(tmp_path / "once" / "model.safetensors"), "pt") as once,
        safe_open(str(tmp_path / "twice" / "model.safetensors"), "pt") as twice,
    ):
        assert sorted(once.keys()) == sorted(twice.keys())
        assert all(torch.equal(once.get_tensor(name), twice.get_tensor(name)) for name in once.keys())  # noqa: SIM118
    assert not (tmp_path / "twice" / ".partial").exists()


def test_a_run_that_another_is_at_work_on_is_refused(llama: Path, tmp_path: Path) -> None:
    """And the other is not disturbed."""

    def meanwhile(done: int, _all: int) -> None:
        if done == 1:
            with pytest.raises(RequestError, match="another `mmserve quantize`"):
                quantizer(llama, tmp_path, "rtn").run()

    assert quantizer(llama, tmp_path, "rtn").run(meanwhile).num_layers == 3
    assert not (tmp_path / ".partial").exists()


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_eight_bits_with_texts_are_stored_as_without(llama: Path, tmp_path: Path, scheme: str) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    quantizer(llama, plain, scheme).run()
    assert quantizer(llama, made, scheme, samples=calibration_ids(32), keep=0.0).run().num_samples == 32
    assert (plain / "config.json").read_text() == (made / "config.json").read_text()
    ids = calibration_ids(8)
    with (
        safe_open(str(plain / "model.safetensors"), "pt") as before,
        safe_open(str(made / "model.safetensors"), "pt") as after,
    ):
        of_plain = {name: before.get_tensor(name) for name in before.keys()}  # noqa: SIM118
        of_made = {name: after.get_tensor(name) for name in after.keys()}  # noqa: SIM118
    assert {name: (x.dtype, x.shape) for name, x in of_plain.items()} == {
        name: (x.dtype, x.shape) for name, x in of_made.items()
    }
    changed = [name for name, x in of_plain.items() if not torch.equal(x.float(), of_made[name].float())]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert torch.isfinite(our_logprobs(made, ids[0].tolist())).all()


def test_a_large_model_is_written_in_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.quantizer.run.SHARD_BYTES", 100_000)
    quantizer(llama, tmp_path / "out", "awq").run()
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert not list((tmp_path / "out").glob("unfinished*"))
    assert float((our_logprobs(tmp_path / "out", IDS) - their_logprobs(tmp_path / "out", IDS)).abs().max()) < 2e-3


def test_what_cannot_be_done_is_said(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="not empty"):
        quantizer(llama, tmp_path / "used", "fp8")
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == ["notes.txt"]
    with pytest.raises(RequestError, match="needs texts"):
        _without_texts(llama, tmp_path / "a")
    with pytest.raises(RequestError, match="does not divide"):
        quantizer(llama, tmp_path / "b", "rtn", group_size=128)
    with pytest.raises(RequestError, match="context of 512"):
        quantizer(llama, tmp_path / "c", "gptq", samples=torch.ones(1, 600, dtype=torch.int64))
    quantizer(llama, tmp_path / "done", "fp8").run()
    with pytest.raises(RequestError, match="quantized already"):
        quantizer(tmp_path / "done", tmp_path / "d", "rtn")
    quantizer(llama, tmp_path / "e", "fp8")
    with pytest.raises(RequestError, match="another model, other texts or other settings"):
        quantizer(llama, tmp_path / "e", "int8")


def _without_texts(folder: Path, out: Path) -> None:
    from mmserve.quantizer.run import ModelQuantizer
    from mmserve.quantizer.settings import QuantizeSettings

    checkpoint = open_checkpoint(str(folder))
    settings = QuantizeSettings(scheme="awq", group_size=32)
    ModelQuantizer(checkpoint, settings, None, out, source=folder, dtype=torch.float32, device=torch.device("cpu"))
