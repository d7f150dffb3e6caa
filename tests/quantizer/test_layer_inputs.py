"""What a layer's matrices are rounded by: inputs that those before them, quantized already, have changed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from quantized_models import SEQ_LEN, calibration_ids
from reference_models import save_reference_model

from mmserve.config import ModelConfig
from mmserve.quantizer.block import INPUTS, LAST_GROUP, DecoderBlock, LayerState, Rounding, Tensors, as_it_is
from mmserve.quantizer.inputs import LayerInputs, Stream
from mmserve.quantizer.layer_quantizer import input_rounding, quantize_layer
from mmserve.quantizer.run import _names_by_layer
from mmserve.quantizer.settings import QuantizeSettings, SchemeName
from mmserve.quantizer.states import HiddenStates
from mmserve.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
NUM_SAMPLES = 5


@dataclass(frozen=True)
class Case:
    """A model's first layer whose states are a little off those of the float model; two samples at a time."""

    config: ModelConfig
    tensors: Tensors
    stream: Stream
    wanted: Stream

    def inputs(self) -> LayerInputs:
        return LayerInputs(self.tensors, self.stream, self.wanted)

    def state(self, stream: Stream, group: str, tensors: Tensors) -> LayerState:
        state = stream.block.start(stream.before.tensor, tensors)
        while state.group != group:
            state = stream.block.advance(state, tensors)
        return state


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return make_case(tmp_path, monkeypatch, as_it_is)


def make_case(folder: Path, monkeypatch: pytest.MonkeyPatch, rounding: Rounding) -> Case:
    monkeypatch.setattr("mmserve.quantizer.inputs._BATCH_TOKENS", 2 * SEQ_LEN)
    checkpoint = open_checkpoint(str(save_reference_model("llama", folder / "model", intermediate_size=128)))
    config = ModelConfig.from_hf(checkpoint.config)
    tensors = {
        name: checkpoint.tensor(full) for name, full in _names_by_layer(checkpoint, config.num_layers)[0].items()
    }

    def stream(kind: str, how: Rounding) -> Stream:
        files = [
            HiddenStates(folder / f"{kind}-{part}", (NUM_SAMPLES, SEQ_LEN, width))
            for part, width in (("before", config.hidden_size), ("after", config.hidden_size), ("between", 128))
        ]
        return Stream(DecoderBlock(config, SEQ_LEN, CPU, rounding=how), files[0], files[1], files[2], CPU)

    quantized, wanted = stream("states", rounding), stream("wanted", as_it_is)
    x = wanted.before.tensor
    x[:] = checkpoint.tensor("model.embed_tokens.weight")[calibration_ids(NUM_SAMPLES)]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    quantized.before.tensor[:] = x * 1.05 + 0.1 * x.std() * noise
    return Case(config, tensors, quantized, wanted)


def test_statistics_are_those_of_the_layer_as_it_is_so_far(case: Case) -> None:
    inputs, so_far = case.inputs(), dict(case.tensors)
    for group, names in INPUTS.items():
        found = inputs.of_next(so_far)
        state, wanted = case.state(case.stream, group, so_far), case.state(case.wanted, group, case.tensors)
        x, wanted_x = state.inputs.flatten(0, 1), wanted.inputs.flatten(0, 1)
        assert torch.allclose(found.gram, x.T @ x / len(x), rtol=1e-4, atol=1e-6)
        assert found.drift is not None
        assert torch.allclose(found.drift, (wanted_x - x).T @ x / len(x), rtol=1e-3, atol=1e-6)
        assert (found.residual_drift is not None) == (group in {"attention_output", "feed_forward_output"})
        if found.residual_drift is not None:
            change = (wanted.x - state.x).flatten(0, 1)
            assert torch.allclose(found.residual_drift, change.T @ x / len(x), rtol=1e-3, atol=1e-6)
        so_far.update({f"{name}.weight": 1.1 * case.tensors[f"{name}.weight"] for name in names})
    inputs.write_outputs(so_far)
    assert torch.allclose(case.stream.after.tensor, case.stream.block(case.stream.before.tensor, so_far), atol=1e-5)
    outputs = case.wanted.block(case.wanted.before.tensor, case.tensors)
    assert torch.allclose(case.wanted.after.tensor, outputs, atol=1e-5)


def test_the_unquantized_layers_statistics(case: Case) -> None:
    inputs = LayerInputs(case.tensors, case.stream, None)
    found = inputs.of_unquantized()
    for group in INPUTS:
        x = case.state(case.stream, group, case.tensors).inputs.flatten(0, 1)
        assert torch.allclose(found[group].gram, x.T @ x / len(x), rtol=1e-4, atol=1e-6)
        assert found[group].drift is None
    inputs.write_outputs(case.tensors)
    outputs = case.stream.block(case.stream.before.tensor, case.tensors)
    assert torch.allclose(case.stream.after.tensor, outputs, atol=1e-5)


def test_the_layer_comes_nearer_to_the_float_models_outputs(case: Case) -> None:
    plain = quantize_layer(case.tensors, None, case.config, settings_of("rtn"), torch.float32)
    of_plain = case.stream.block(case.stream.before.tensor, plain.computed)
    inputs = case.inputs()
    made = quantize_layer(case.tensors, inputs, case.config, settings_of("gptq"), torch.float32)
    inputs.write_outputs(made.computed)
    wanted = case.wanted.after.tensor
    assert float((case.stream.after.tensor - wanted).norm()) < 0.9 * float((of_plain - wanted).norm())


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_eight_bits_come_nearer_to_the_layers_own_outputs(
    scheme: SchemeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(scheme)
    case = make_case(tmp_path, monkeypatch, input_rounding(scheme))
    wanted = case.wanted.block(case.stream.before.tensor, case.tensors)
    plain = quantize_layer(case.tensors, None, case.config, settings, torch.float32)
    of_plain = case.stream.block(case.stream.before.tensor, plain.computed)
    inputs = LayerInputs(case.tensors, case.stream, None)
    made = quantize_layer(case.tensors, inputs, case.config, settings, torch.float32)
    inputs.write_outputs(made.computed)
    # Rounding the inputs is most of what is left.
    assert float((case.stream.after.tensor - wanted).norm()) < 0.95 * float((of_plain - wanted).norm())


def test_inputs_of_what_is_kept_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, monkeypatch, as_it_is)
    rounding = input_rounding("fp8")
    block = DecoderBlock(case.config, SEQ_LEN, CPU, rounding=rounding, kept={"feed_forward"})
    state = block.start(case.stream.before.tensor, case.tensors)
    exact = case.stream.block.start(case.stream.before.tensor, case.tensors)
    for group in INPUTS:
        rounded = exact.inputs if group == "feed_forward" else rounding(exact.inputs)
        assert torch.allclose(state.inputs, rounded, atol=1e-5), group
        if group != LAST_GROUP:
            exact = case.stream.block.advance(state, case.tensors)
            state = block.advance(state, case.tensors)


def settings_of(scheme: SchemeName) -> QuantizeSettings:
    return QuantizeSettings(scheme=scheme, group_size=32)
